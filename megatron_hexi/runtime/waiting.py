"""How long a rank waits in a training step: for what other ranks send it, and thereby for them.

A wait is a piece of the device's time line between two marks: events of the current CUDA stream, which
nobody has to wait for when they are set. On the CPU, where `torch.cuda` is answered for, an event is a look
at the clock. Waiting thus includes the transfer itself, as far as no work hides it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch

#: attention: the exchange of keys and values, their gradients, and the all-to-alls; gradients: those of
#: weights, and the weights themselves; pipeline: what stages send each other.
Wait = Literal["attention", "gradients", "pipeline"]
WAITS: tuple[Wait, ...] = get_args(Wait)

_MS = 1e-3
#: Steps that are kept for `StepMeter.heard`, which nobody may call.
_UNHEARD = 1000


@dataclass(frozen=True)
class StepTimes:
    """What one training step took on this rank, seconds.

    Args:
        seconds: from its begin to its end.
        waited: of it, by kind; empty where waits were not measured.
    """

    seconds: float
    waited: dict[Wait, float]


class StepMeter:
    """Measures training steps, and the waits inside."""

    def __init__(self) -> None:
        self.is_new = True  # no step has been measured
        self._under_way: deque[_Step] = deque()
        self._finished: list[StepTimes] = []
        self._unheard: deque[StepTimes] = deque(maxlen=_UNHEARD)

    @contextmanager
    def step(self, waits: bool = True) -> Iterator[None]:
        """Measure what is done inside as one training step.

        Args:
            waits: whether the waits inside are measured too: two more events each.
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
        """The steps since the last call, in order. Waits until the device has finished them."""
        torch.cuda.synchronize()
        self._collect()
        assert not self._under_way
        taken, self._finished = self._finished, []
        return taken

    def heard(self) -> list[StepTimes]:
        """The steps since the last call that the device has finished, in order; waits for none."""
        self._collect()
        heard = list(self._unheard)
        self._unheard.clear()
        return heard

    def _collect(self) -> None:
        while self._under_way and self._under_way[0].end.query():
            self._finished.append(self._under_way.popleft().times())
            self._unheard.append(self._finished[-1])


def waiting(kind: Wait) -> AbstractContextManager[None]:
    """Count what is done inside as waiting, if a step is being measured; a wait inside a wait counts once."""
    global _begun
    _begun += 1
    return nullcontext() if _current is None or _current.waits else _current.wait(kind)


class _Step:
    """One step's marks on the time line of the device."""

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
    """How many waits this process has begun: it moves on as long as this grows."""
    return _begun


#: The step under way in this process, if it is measured.
_current: _Step | None = None
_begun = 0
