"""Times a piece of work on a device until the figure is steady."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

#: A sample lasts at least so long, so that neither clock nor launch shows.
_SAMPLE_S = 0.02
#: Clocks, caches and the choice of an algorithm settle in this time.
_WARM_UP_S = 0.5
_MOST_CALLS = 1000
_MOST_SAMPLES = 9

#: Work that is measured: called many times, its result is dropped.
Work = Callable[[], object]


class Clock(Protocol):
    """Times work on a device."""

    def seconds(self, work: Work, calls: int) -> float:
        """Return the mean seconds of a call, over `calls` in a row."""


class WallClock:
    """Times work that is done when the call returns."""

    def seconds(self, work: Work, calls: int) -> float:
        """See `Clock.seconds`."""
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) / calls


class CudaClock:
    """Times asynchronous work of a GPU, between two events in its stream."""

    def seconds(self, work: Work, calls: int) -> float:
        """See `Clock.seconds`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if device.type == "cuda" else WallClock()


def steady_seconds(work: Work, clock: Clock, limit_s: float) -> float:
    """Return the seconds of one call: the median of up to nine samples, after a warm-up.

    Args:
        limit_s: no further sample is taken that would go beyond; one always is.
    """
    spent, warm_up_s = 0.0, min(_WARM_UP_S, limit_s / 4)
    while spent < warm_up_s:
        once = max(clock.seconds(work, 1), 1e-6)
        spent += once
    once = max(clock.seconds(work, 1), 1e-9)
    calls = min(_MOST_CALLS, math.ceil(_SAMPLE_S / once))
    count = max(1, min(_MOST_SAMPLES, int(limit_s / (once * calls))))
    # One call that lasts is a sample already.
    samples = [once] if calls == 1 else []
    return median([*samples, *(clock.seconds(work, calls) for _ in range(count - len(samples)))])
