"""The exchange of keys and values between groups, and its mirror for their gradients.

Every message goes straight from owner to user. In the forward direction a bounded number of steps is
under way ahead of the one in use, so that the wire works while the kernels do; the gradients of a step
travel back while the next step is computed, the last ones while the caller computes what it kept for that.

Keys and values of one head lie side by side: a buffer is [K, B, G, Dk + Dv], so that the KV heads that
one owner serves are one contiguous piece of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Part, Schedule, Step, Transfer
from megatron_hexi.runtime.wire import Message, Transfers, post


class KeyExchange:
    """Sends a rank's keys and values to their users, and iterates over those that it uses itself.

    Starts on construction. Iterating gives, part by part of each step, the step, the part, and the keys and
    values received: [k, B, S, Dk + Dv] for the part's KV heads, or ``None`` where the rank uses none.

    Args:
        keys: the rank's own keys and values, [k, B, G, Dk + Dv], contiguous.
        schedule: the rank's split tables.
        group: the ranks of the domain.
        window: steps under way ahead of the one in use.
    """

    def __init__(self, keys: Tensor, schedule: Schedule, group: dist.ProcessGroup, window: int) -> None:
        self._keys = keys
        self._seen: dict[tuple[Range, ...], Tensor] = {}
        self._schedule = schedule
        self._group = group
        self._waiting = deque(schedule.steps)
        self._under_way: deque[tuple[Step, list[tuple[Part, Tensor | None, Transfers]]]] = deque()
        for _ in range(window):
            self._start_next()

    def __iter__(self) -> Iterator[tuple[Step, Part, Tensor | None]]:
        while self._under_way:
            self._start_next()
            step, parts = self._under_way.popleft()
            for part, keys, transfers in parts:
                transfers.wait()
                yield step, part, keys

    def _start_next(self) -> None:
        if not self._waiting:
            return
        step = self._waiting.popleft()
        self._under_way.append((step, [(part, *self._start(part)) for part in step.parts]))

    def _start(self, part: Part) -> tuple[Tensor | None, Transfers]:
        received = _buffer(self._keys, part)
        receives = [Message(transfer.peer, _heads(received, transfer, part.kv)) for transfer in part.receives]
        sends = [
            Message(transfer.peer, _heads(self._rows(transfer.rows), transfer, self._schedule.own_kv))
            for transfer in part.sends
        ]
        return received, post(receives, sends, self._group, tag=2 * part.number)

    def _rows(self, rows: tuple[Range, ...]) -> Tensor:
        """Some tokens of the own keys, contiguous; groups ask for few selections, so each is kept."""
        if rows not in self._seen:
            parts = [self._keys[:, :, slice(*part)] for part in rows]
            self._seen[rows] = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=2)
        return self._seen[rows]


class GradientReturn:
    """Sends the gradients of received keys and values to their owners, and adds up those that come back.

    `window` steps are under way while the next is computed; the last ones remain so until `finish`.

    Args:
        total: where the gradients of the own keys and values are added up, [k, B, G, Dk + Dv].
        schedule: the rank's split tables.
        group: the ranks of the domain.
        window: steps under way while the next one is computed.
    """

    def __init__(self, total: Tensor, schedule: Schedule, group: dist.ProcessGroup, window: int) -> None:
        self._window = window
        self._total = total
        self._schedule = schedule
        self._group = group
        self._steps = 0
        self._under_way: deque[list[tuple[list[tuple[Transfer, Tensor]], Transfers]]] = deque()

    def post(self, step: Step, part: Part, gradient: Tensor | None, like: Tensor) -> None:
        """Start the way back of one part of a step; all parts of every step are posted, in order.

        Args:
            step: the step.
            part: the part.
            gradient: gradients of what the part received, [k, B, S, Dk + Dv], contiguous.
            like: a tensor of the type that travels.
        """
        batch, width = self._total.shape[1], self._total.shape[3]
        arriving = [
            (sent, like.new_empty(sent.kv[1] - sent.kv[0], batch, sent.keys, width)) for sent in part.sends
        ]
        returning = [
            Message(received.peer, _heads(gradient, received, part.kv)) for received in part.receives
        ]
        transfers = post(
            [Message(sent.peer, buffer) for sent, buffer in arriving],
            returning,
            self._group,
            tag=2 * part.number + 1,
        )
        if part is step.parts[0]:
            self._under_way.append([])
        self._under_way[-1].append((arriving, transfers))
        if part is not step.parts[-1]:
            return
        self._steps += 1
        # After the last step nothing is waited for: what the caller has left to compute hides it.
        if self._window < self._steps < len(self._schedule.steps):
            self._collect()

    def finish(self) -> None:
        """Wait for what is still under way; `total` is complete after this."""
        while self._under_way:
            self._collect()

    def _collect(self) -> None:
        for arriving, transfers in self._under_way.popleft():
            transfers.wait()
            for sent, buffer in arriving:
                total = _heads(self._total, sent, self._schedule.own_kv)
                sizes = [stop - start for start, stop in sent.rows]
                for rows, part in zip(sent.rows, buffer.split(sizes, dim=2), strict=True):
                    total[:, :, slice(*rows)].add_(part)


def _buffer(keys: Tensor, part: Part) -> Tensor | None:
    if not part.receives:
        return None
    return keys.new_empty(part.kv[1] - part.kv[0], keys.shape[1], part.keys, keys.shape[3])


def _heads(buffer: Tensor | None, transfer: Transfer, held: Range) -> Tensor:
    """The piece of a buffer with some KV heads that holds the transfer's."""
    assert buffer is not None
    return buffer[transfer.kv[0] - held[0] : transfer.kv[1] - held[0]]
