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

import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Schedule, Step, Transfer
from megatron_hexi.runtime.wire import Message, Transfers, post


class KeyExchange:
    """Sends a rank's keys and values to their users, and iterates over those that it uses itself.

    Starts on construction. Iterating gives, step by step, the step and the keys and values received:
    [k, B, S, Dk + Dv] for the rank's own KV heads, or ``None`` in a step where it uses none.

    Args:
        keys: the rank's own keys and values, [k, B, G, Dk + Dv], contiguous.
        schedule: the rank's split tables.
        group: the ranks of the domain.
        window: steps under way ahead of the one in use.
    """

    def __init__(self, keys: Tensor, schedule: Schedule, group: dist.ProcessGroup, window: int) -> None:
        self._keys = keys
        self._prefixes: dict[int, Tensor] = {}
        self._schedule = schedule
        self._group = group
        self._waiting = deque(enumerate(schedule.steps))
        self._under_way: deque[tuple[Step, Tensor | None, Transfers]] = deque()
        for _ in range(window):
            self._start_next()

    def __iter__(self) -> Iterator[tuple[Step, Tensor | None]]:
        while self._under_way:
            self._start_next()
            step, keys, transfers = self._under_way.popleft()
            transfers.wait()
            yield step, keys

    def _start_next(self) -> None:
        if not self._waiting:
            return
        number, step = self._waiting.popleft()
        received = _buffer(self._keys, self._schedule, step)
        receives = [
            Message(part.peer, _heads(received, part, self._schedule.own_kv)) for part in step.receives
        ]
        sends = [
            Message(part.peer, _heads(self._prefix(part.keys), part, self._schedule.own_kv))
            for part in step.sends
        ]
        self._under_way.append((step, received, post(receives, sends, self._group, tag=2 * number)))

    def _prefix(self, tokens: int) -> Tensor:
        """The first tokens of the own keys, contiguous; layouts use few lengths, so each is kept."""
        if tokens not in self._prefixes:
            self._prefixes[tokens] = self._keys[:, :, :tokens].contiguous()
        return self._prefixes[tokens]


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
        self._number = 0
        self._under_way: deque[tuple[list[tuple[Transfer, Tensor]], Transfers]] = deque()

    def post(self, step: Step, gradient: Tensor | None, like: Tensor) -> None:
        """Start the way back of one step; every step is posted, in order.

        Args:
            step: the step.
            gradient: gradients of what the step received, [k, B, S, Dk + Dv], contiguous.
            like: a tensor of the type that travels.
        """
        batch, width = self._total.shape[1], self._total.shape[3]
        arriving = [
            (part, like.new_empty(part.kv[1] - part.kv[0], batch, part.keys, width)) for part in step.sends
        ]
        returning = [
            Message(part.peer, _heads(gradient, part, self._schedule.own_kv)) for part in step.receives
        ]
        transfers = post(
            [Message(part.peer, buffer) for part, buffer in arriving],
            returning,
            self._group,
            tag=2 * self._number + 1,
        )
        self._number += 1
        self._under_way.append((arriving, transfers))
        # After the last step nothing is waited for: what the caller has left to compute hides it.
        if self._window < self._number < len(self._schedule.steps):
            self._collect()

    def finish(self) -> None:
        """Wait for what is still under way; `total` is complete after this."""
        while self._under_way:
            self._collect()

    def _collect(self) -> None:
        arriving, transfers = self._under_way.popleft()
        transfers.wait()
        for part, buffer in arriving:
            _heads(self._total, part, self._schedule.own_kv)[:, :, : part.keys].add_(buffer)


def _buffer(keys: Tensor, schedule: Schedule, step: Step) -> Tensor | None:
    if not step.receives:
        return None
    heads = schedule.own_kv[1] - schedule.own_kv[0]
    return keys.new_empty(heads, keys.shape[1], step.keys, keys.shape[3])


def _heads(buffer: Tensor | None, part: Transfer, own: Range) -> Tensor:
    """The piece of a buffer that holds the transfer's KV heads."""
    assert buffer is not None
    return buffer[part.kv[0] - own[0] : part.kv[1] - own[0]]
