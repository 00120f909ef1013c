"""Faults of documents that are assigned anew in every batch, for `tests.megatron.planted`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_hexi.megatron.session import LocalShard, Session, active_session
from megatron_hexi.megatron.stages.communicator import BorderChannels
from megatron_hexi.runtime.row_channel import RowChannel


def _rows_one_off() -> None:
    """Each rank sends over a border the rows before those that the table says."""
    original = RowChannel._outgoing
    RowChannel._outgoing = lambda self, rows, message: original(self, rows.roll(1, 0), message)  # type: ignore[method-assign]


def _padding_of_the_plan() -> None:
    """Routers take the plan's rows for those of the micro-batch."""
    from megatron_hexi.megatron import router_losses

    original = router_losses.padding_rows

    def padding_rows(shard: LocalShard, rows: int, device: torch.device) -> Tensor:
        session = active_session()
        assert session is not None
        return original(dataclasses.replace(shard, tokens=session.shard.tokens), rows, device)

    router_losses.padding_rows = padding_rows


def _gradients_by_the_newest_shares() -> None:
    """A backward pass takes the documents of the micro-batch that went forward last."""
    original = BorderChannels.begin_backward

    def begin_backward(self: BorderChannels) -> None:
        newest = self._documents[self._ministage][-1]
        original(self)
        self._backward_documents = newest

    BorderChannels.begin_backward = begin_backward  # type: ignore[method-assign]


def _recomputed_by_the_newest_shares() -> None:
    """Layers that are computed again take the shares of the micro-batch that was met last."""
    from megatron_hexi.megatron import core_attention, packing, router_losses

    original, newest = packing.packed_shard, list[packing.PackedShard]()

    def packed_shard(session: Session, ends: Tensor) -> packing.PackedShard:
        found = original(session, ends)
        if all(found is not one for one in newest):
            newest.append(found)
        return newest[-1]

    for module in (core_attention, router_losses):
        vars(module)["packed_shard"] = packed_shard


#: By their names.
DEALT_FAULTS: dict[str, Callable[[], None]] = {
    "rows-one-off": _rows_one_off,
    "padding-of-the-plan": _padding_of_the_plan,
    "gradients-by-the-newest-shares": _gradients_by_the_newest_shares,
    "recomputed-by-the-newest-shares": _recomputed_by_the_newest_shares,
}
