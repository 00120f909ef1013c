"""Our entry point with a fault planted in what joins stages that differ: ``--planted NAME`` says which."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_hexi.mesh import RowMessage
from megatron_hexi.runtime.bucket_buffer import BucketBuffer
from megatron_hexi.runtime.hand_out import HandOut
from megatron_hexi.runtime.piece_buffers import PieceBuffers
from megatron_hexi.runtime.row_channel import RowChannel


def _copies_unscaled() -> None:
    from megatron_hexi.megatron.stages import gradients

    gradients._is_partial = lambda *_: True


def _parts_as_copies() -> None:
    """Each rank's own sinks are divided as if all ranks of a unit had them."""
    from megatron_hexi.megatron.stages import gradients

    gradients._held_by_all = lambda boxes: {
        (box.key, box.cell) for own in boxes for box in own if "softmax_offset" in box.key
    }


def _one_ranks_gradient_infinite() -> None:
    from megatron_hexi.megatron.stages.optimizer import PieceOptimizer

    original = PieceOptimizer._copy_model_grads_to_main_grads

    def copy(self: PieceOptimizer) -> None:
        original(self)
        if self.buffers.rank == 1:
            gradient = self.owned[-1].main.grad
            assert gradient is not None
            gradient.view(-1)[-1] = float("inf")

    PieceOptimizer._copy_model_grads_to_main_grads = copy  # type: ignore[method-assign]


def _a_holder_adds_nothing() -> None:
    original = PieceBuffers._lay_out

    def lay_out(self: PieceBuffers, *args: Any) -> BucketBuffer:
        buffer = original(self, *args)
        if self.rank == 0:
            buffer.scales.append((slice(0, buffer.bucket.size), 0.0))
        return buffer

    PieceBuffers._lay_out = lay_out  # type: ignore[assignment, method-assign]


def _rows_in_another_order() -> None:
    original = RowChannel._outgoing

    def outgoing(self: RowChannel, rows: Tensor, message: RowMessage) -> Tensor:
        packed = original(self, rows, message)
        return packed.view(-1, rows.shape[2]).flip(0).flatten()

    RowChannel._outgoing = outgoing  # type: ignore[method-assign]


def _new_weights_not_waited_for() -> None:
    HandOut.settle = lambda self, buffers: None  # type: ignore[method-assign]


#: Found by the comparison of losses and norms.
FAULTS: dict[str, Callable[[], None]] = {
    "copies-unscaled": _copies_unscaled,
    "a-holder-adds-nothing": _a_holder_adds_nothing,
    "rows-in-another-order": _rows_in_another_order,
    "new-weights-not-waited-for": _new_weights_not_waited_for,
}

#: Those of which only other comparisons say anything.
OTHER_FAULTS: dict[str, Callable[[], None]] = {
    "parts-as-copies": _parts_as_copies,
    "one-ranks-gradient-infinite": _one_ranks_gradient_infinite,
}


def main() -> None:
    """Train with the fault."""
    from megatron_hexi import pretrain_gpt

    place = sys.argv.index("--planted")
    {**FAULTS, **OTHER_FAULTS}[sys.argv[place + 1]]()
    del sys.argv[place : place + 2]
    pretrain_gpt.main()
