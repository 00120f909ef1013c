"""Throttles: GPUs that are slower than their curves for a while."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_hexi.errors import HexiError

_SPELLING = re.compile(
    r"(?P<gpu>\d{1,5})=(?P<factor>\d*\.?\d+)@(?P<begin>\d+(\.\d+)?)\.\.(?P<end>\d+(\.\d+)?)?"
)


@dataclass(frozen=True)
class Throttle:
    """A GPU at another speed for some time.

    Args:
        begin_s: begin, s after the rank's first paced operation.
        end_s: end, s after that; ``None``: until the job ends.
    """

    gpu: int
    factor: float
    begin_s: float
    end_s: float | None = None

    def holds(self, seconds: float) -> bool:
        """Return whether the throttle is active, by seconds since the first paced operation."""
        return self.begin_s <= seconds and (self.end_s is None or seconds < self.end_s)


def parse_throttle(text: str, gpus: int) -> Throttle:
    """Parse a throttle: ``2=0.5@60..180`` is GPU 2 at half its speed from second 60 to 180."""
    match = _SPELLING.fullmatch(text)
    if match is not None:
        end = match["end"]
        throttle = Throttle(
            int(match["gpu"]),
            float(match["factor"]),
            float(match["begin"]),
            None if end is None else float(end),
        )
        later = throttle.end_s is None or throttle.end_s > throttle.begin_s
        if throttle.gpu < gpus and 0 < throttle.factor <= 1 and later:
            return throttle
    raise HexiError(
        f"--throttle {text[:40]}: write GPU=SPEED@BEGIN..END, a GPU from 0 to {gpus - 1}, a part of its "
        "speed, and seconds of the job: 2=0.5@60..180, or 2=0.5@60.. until it ends"
    )


def speed_at(throttles: Iterable[Throttle], seconds: float) -> float:
    """Return the factor on a GPU's curves at a time, given its throttles."""
    factor = 1.0
    for throttle in throttles:
        if throttle.holds(seconds):
            factor *= throttle.factor
    return factor
