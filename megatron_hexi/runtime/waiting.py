"""Measure the time that a rank waits for messages in a training step.

A wait is the time on the device between two events of the current CUDA stream, which are recorded without
synchronization. On the CPU, where the platform replaces `torch.cuda`, an event reads the clock. A wait
includes the part of the transfer that no computation hides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch

#: Kinds of waits. `attention`: for keys and values, gradients of both, and all-to-alls. `gradients`: for
#: weights and gradients of weights. `pipeline`: for messages between stages. `experts`: for tokens on their
#: way to experts and back, and for sums over routers.
Wait = Literal["attention", "gradients", "pipeline", "experts"]
WAITS: tuple[Wait, ...] = get_args(Wait)

_MS = 1e-3
#: Largest number of steps kept for `StepMeter.take_finished`, in case it is never called.
_MOST_FINISHED = 1000


@dataclass(frozen=True)
class StepTimes:
    """The duration of one training step on this rank, and the part of it spent waiting.

    Args:
        waited: seconds spent waiting, by kind of wait; empty if waits were not measured.
    """

    seconds: float
    waited: dict[Wait, float]


class StepMeter:
    """A meter of the duration of training steps, and of the waits inside each step."""

    def __init__(self) -> None:
        self.is_new = True  # no step has been measured
        self._under_way: deque[_Step] = deque()
        self._finished: list[StepTimes] = []
        self._unread: deque[StepTimes] = deque(maxlen=_MOST_FINISHED)

    @contextmanager
    def step(self, waits: bool = True) -> Iterator[None]:
        """Measure the context as one training step.

        Args:
            waits: whether to measure the waits inside the step too, each with two more events.
        """
        global _current
        self._collect()  # Steps that the device has finished by now: their events need not be kept.
        self.is_new = False
        step = _Step(waits)
        _current = step if waits else None
        try:
            yield
        finally:
            _current = None
        step.end.record()
        self._under_way.append(step)

    def take(self) -> list[StepTimes]:
        """Return the times of the steps since the last call, in order, after the device has finished them."""
        torch.cuda.synchronize()
        self._collect()
        assert not self._under_way
        steps, self._finished = self._finished, []
        return steps

    def take_finished(self) -> list[StepTimes]:
        """Return the times of steps since the last call that the device has finished, without waiting."""
        self._collect()
        steps = list(self._unread)
        self._unread.clear()
        return steps

    def _collect(self) -> None:
        while self._under_way and self._under_way[0].end.query():
            self._finished.append(self._under_way.popleft().times())
            self._unread.append(self._finished[-1])


def waiting(kind: Wait) -> AbstractContextManager[None]:
    """Count the time of this context as waiting, if a step is being measured; nested waits count once."""
    global _begun
    _begun += 1
    return nullcontext() if _current is None or _current.waits else _current.wait(kind)


class _Step:
    """The events of one training step on the device."""

    def __init__(self, measures_waits: bool) -> None:
        self.begin, self.end = _event(), _event()
        self.waits = False
        self._measures_waits = measures_waits
        self._spans: list[tuple[Wait, torch.cuda.Event, torch.cuda.Event]] = []
        self.begin.record()

    @contextmanager
    def wait(self, kind: Wait) -> Iterator[None]:
        begin, end = _event(), _event()
        begin.record()
        self.waits = True
        try:
            yield
        finally:
            self.waits = False
        end.record()
        self._spans.append((kind, begin, end))

    def times(self) -> StepTimes:
        seconds = self.begin.elapsed_time(self.end) * _MS
        if not self._measures_waits:
            return StepTimes(seconds, {})
        waited: dict[Wait, float] = dict.fromkeys(WAITS, 0.0)
        for kind, begin, end in self._spans:
            waited[kind] += begin.elapsed_time(end) * _MS
        return StepTimes(seconds, waited)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def waits_begun() -> int:
    """Return the number of waits that this process has begun; while this grows, the process progresses."""
    return _begun


#: The current step of this process, if its waits are measured.
_current: _Step | None = None
_begun = 0
