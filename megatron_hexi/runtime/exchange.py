"""The exchange of keys and values between groups, and its mirror for their gradients, part by part.

Every message goes straight from owner to user. When parts are posted and waited for is the program's
(`plan.program`).

Keys and values of one head lie side by side: a buffer is [K, B, G, Dk + Dv], so that the KV heads that
one owner serves are one contiguous piece of it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Part, Schedule, Transfer
from megatron_hexi.runtime.call_rows import Rows, rows_of
from megatron_hexi.runtime.wire import Message, Transfers, post


class KeyExchange:
    """Sends a rank's keys and values to their users, and receives those that it uses itself.

    Args:
        keys: the rank's own keys and values, [k, B, G, Dk + Dv], contiguous.
        schedule: the rank's split tables.
        group: the ranks of the domain.
    """

    def __init__(self, keys: Tensor, schedule: Schedule, group: dist.ProcessGroup) -> None:
        self._keys = keys
        self._seen: dict[tuple[Range, ...], Tensor] = {}
        self._schedule = schedule
        self._group = group
        self._under_way: dict[int, tuple[Tensor | None, Transfers]] = {}

    def post(self, part: Part) -> None:
        """Start a part; all ranks post theirs in the order of their numbers."""
        received = _buffer(self._keys, part)
        receives = [Message(transfer.peer, _heads(received, transfer, part.kv)) for transfer in part.receives]
        sends = [
            Message(transfer.peer, _heads(self._rows(transfer.rows), transfer, self._schedule.own_kv))
            for transfer in part.sends
        ]
        self._under_way[part.number] = received, post(receives, sends, self._group, tag=2 * part.number)

    def wait(self, part: Part) -> Tensor | None:
        """What has arrived of a part, [k, B, S, Dk + Dv] for its KV heads; ``None``: the rank uses none."""
        received, transfers = self._under_way.pop(part.number)
        transfers.wait()
        return received

    def _rows(self, rows: tuple[Range, ...]) -> Tensor:
        """Some tokens of the own keys, contiguous; groups ask for few selections, so each is kept."""
        if rows not in self._seen:
            self._seen[rows] = _rows(rows, self._keys.device).taken(self._keys).contiguous()
        return self._seen[rows]


class GradientReturn:
    """Sends the gradients of received keys and values to their owners, and adds up those that come back.

    Args:
        total: where the gradients of the own keys and values are added up, [k, B, G, Dk + Dv]; complete when
            all parts have been waited for.
        schedule: the rank's split tables.
        group: the ranks of the domain.
    """

    def __init__(self, total: Tensor, schedule: Schedule, group: dist.ProcessGroup) -> None:
        self._total = total
        self._schedule = schedule
        self._group = group
        self._under_way: dict[int, tuple[list[tuple[Transfer, Tensor]], Transfers]] = {}

    def post(self, part: Part, gradient: Tensor | None, like: Tensor) -> None:
        """Start the way back of a part.

        Args:
            part: the part.
            gradient: gradients of what the part received, [k, B, S, Dk + Dv], contiguous.
            like: a tensor of the type that travels.
        """
        batch, width = self._total.shape[1], self._total.shape[3]
        arriving = [
            (sent, like.new_empty(sent.kv[1] - sent.kv[0], batch, sent.keys, width)) for sent in part.sends
        ]
        transfers = post(
            [Message(sent.peer, buffer) for sent, buffer in arriving],
            [Message(received.peer, _heads(gradient, received, part.kv)) for received in part.receives],
            self._group,
            tag=2 * part.number + 1,
        )
        self._under_way[part.number] = arriving, transfers

    def wait(self, part: Part) -> None:
        """Add up what has come back of a part."""
        arriving, transfers = self._under_way.pop(part.number)
        transfers.wait()
        for sent, buffer in arriving:
            total = _heads(self._total, sent, self._schedule.own_kv)
            _rows(sent.rows, total.device).add(total, buffer)


@lru_cache(maxsize=2**8)  # of the latest schedules
def _rows(rows: tuple[Range, ...], device: torch.device) -> Rows:
    return rows_of(rows, device)


def _buffer(keys: Tensor, part: Part) -> Tensor | None:
    if not part.receives:
        return None
    return keys.new_empty(part.kv[1] - part.kv[0], keys.shape[1], part.keys, keys.shape[3])


def _heads(buffer: Tensor | None, transfer: Transfer, held: Range) -> Tensor:
    """The piece of a buffer with some KV heads that holds the transfer's."""
    assert buffer is not None
    return buffer[transfer.kv[0] - held[0] : transfer.kv[1] - held[0]]
