"""The exchange of keys and values between groups, and its mirror for their gradients, part by part.

Every message goes straight from owner to user. When parts are posted and waited for is the program's
(`plan.program`).

Keys and values of one head lie side by side: a buffer is [K, B, G, Dk + Dv], so that the KV heads that
one owner serves are one contiguous piece of it.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Part, Schedule, Transfer
from megatron_hexi.runtime import fused
from megatron_hexi.runtime.call_rows import rows_of
from megatron_hexi.runtime.sums import RowSum
from megatron_hexi.runtime.wire import Message, Transfers, post


class KeyExchange:
    """Sends a rank's keys and values to their users, and receives those that it uses itself.

    Args:
        key: the rank's own keys, [B, k, G, Dk].
        value: likewise, [B, k, G, Dv].
        schedule: the rank's split tables.
        group: the ranks of the domain.
    """

    def __init__(self, key: Tensor, value: Tensor, schedule: Schedule, group: dist.ProcessGroup) -> None:
        self._key, self._value = key, value
        self._seen: dict[tuple[Range, ...], Tensor] = {}
        self._schedule = schedule
        self._group = group
        self._under_way: dict[int, tuple[Tensor | None, Transfers]] = {}

    def post(self, part: Part) -> None:
        """Start a part; all ranks post theirs in the order of their numbers."""
        received = self.buffer(part.kv, part.keys) if part.receives else None
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

    def buffer(self, kv: Range, keys: int) -> Tensor:
        """Room for so many keys and values of some KV heads, as they travel."""
        batch, _, _, size = self._key.shape
        return self._key.new_empty(kv[1] - kv[0], batch, keys, size + self._value.shape[3])

    def apart(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Views of keys and values that lie side by side, [B, k, S, D] each."""
        both, size = buffer.transpose(0, 1), self._key.shape[3]
        return both[..., :size], both[..., size:]

    def _rows(self, ranges: tuple[Range, ...]) -> Tensor:
        """Some tokens of the own keys, as they travel; groups ask for few selections, so each is kept."""
        if ranges not in self._seen:
            rows = rows_of(ranges, self._key.device)
            buffer = self.buffer(self._schedule.own_kv, sum(stop - start for start, stop in ranges))
            for target, source in zip(self.apart(buffer), (self._key, self._value), strict=True):
                fused.copy_rows(target, source, rows)
            self._seen[ranges] = buffer
        return self._seen[ranges]


class GradientReturn:
    """Sends the gradients of received keys and values to their owners, and adds up those that come back.

    Args:
        keys: in which the gradients of the own keys are added up; complete when all parts have been waited
            for.
        values: likewise.
        exchange: the keys' way there.
        schedule: the rank's split tables.
        group: the ranks of the domain.
    """

    def __init__(
        self,
        keys: RowSum,
        values: RowSum,
        exchange: KeyExchange,
        schedule: Schedule,
        group: dist.ProcessGroup,
    ) -> None:
        self._sums = keys, values
        self._exchange = exchange
        self._schedule = schedule
        self._group = group
        self._under_way: dict[int, tuple[list[tuple[Transfer, Tensor]], Transfers]] = {}

    def post(self, part: Part, gradient: Tensor | None) -> None:
        """Start the way back of a part.

        Args:
            part: the part.
            gradient: gradients of what the part received, [k, B, S, Dk + Dv], contiguous.
        """
        arriving = [(sent, self._exchange.buffer(sent.kv, sent.keys)) for sent in part.sends]
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
        first = self._schedule.own_kv[0]
        for sent, buffer in arriving:
            heads, rows = (sent.kv[0] - first, sent.kv[1] - first), rows_of(sent.rows, buffer.device)
            for total, gradient in zip(self._sums, self._exchange.apart(buffer), strict=True):
                total.add(heads, rows, gradient)


def _heads(buffer: Tensor | None, transfer: Transfer, held: Range) -> Tensor:
    """The piece of a buffer with some KV heads that holds the transfer's."""
    assert buffer is not None
    return buffer[transfer.kv[0] - held[0] : transfer.kv[1] - held[0]]
