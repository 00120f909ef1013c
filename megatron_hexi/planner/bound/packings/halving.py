"""Between two times, the least that suffices: the search that all parts of the lower bound have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence


def least_sufficient(
    suffices: Callable[[float], bool],
    low: float,
    high: float,
    precision: float,
    steps: Sequence[float] = (0.5,),
) -> float:
    """A time that does not suffice, or `low`, so close below one that does, or `high`.

    Args:
        suffices: whether a time does; if it does, so does any longer one.
        low: seconds, known to be no more than what suffices.
        high: seconds that suffice.
        precision: how close, as a part of the time.
        steps: where to look, as parts of what is between the two; the last of them again and again.
    """
    for step in itertools.chain(steps, itertools.repeat(steps[-1])):
        if high - low <= precision * high:
            break
        middle = low + step * (high - low)
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return low
