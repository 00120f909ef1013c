"""Between two times, the least that suffices: the search that all parts of the lower bound have in common."""

from __future__ import annotations

from collections.abc import Callable


def least_sufficient(suffices: Callable[[float], bool], low: float, high: float, precision: float) -> float:
    """A time that does not suffice, or `low`, so close below one that does, or `high`.

    Args:
        suffices: whether a time does; if it does, so does any longer one.
        low: seconds, known to be no more than what suffices.
        high: seconds that suffice.
        precision: how close, as a part of the time.
    """
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return low
