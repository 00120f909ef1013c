"""Numbers and lists as text: the same everywhere, in tables, errors and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


class TimeUnit(NamedTuple):
    """A unit of time.

    Args:
        word: name of the unit below an axis.
    """

    seconds: float
    name: str
    word: str


#: Units with the least seconds for each: below ten minutes people count seconds, below two hours minutes.
_TIMES = (
    (2 * 86400, TimeUnit(86400, "days", "days")),
    (2 * 3600, TimeUnit(3600, "h", "hours")),
    (600, TimeUnit(60, "min", "minutes")),
    (1, TimeUnit(1, "s", "seconds")),
    (1e-3, TimeUnit(1e-3, "ms", "milliseconds")),
    (0, TimeUnit(1e-6, "µs", "microseconds")),
)


def time_unit(seconds: float) -> TimeUnit:
    """Return the unit for a time, or for times of which it is the longest."""
    return next(unit for least, unit in _TIMES if seconds >= least)


def spell_time(seconds: float, unit: TimeUnit | None = None) -> str:
    """Return a time in three digits with its unit: ``17.3 min``, ``405 s``, ``12.5 ms``; ``0 s`` for zero.

    Args:
        unit: ``None``: a suitable one.
    """
    if seconds == 0 and unit is None:
        return "0 s"
    unit = unit or time_unit(seconds)
    count = seconds / unit.seconds
    return f"{count:,.0f} {unit.name}" if count >= 99.95 else f"{count:.3g} {unit.name}"


def spell_seconds(seconds: float | None) -> str:
    """Return seconds with at least three digits: ``1,234``, ``-12.3``, ``0.0123``; ``–`` for ``None``."""
    if seconds is None:
        return "–"
    if abs(seconds) < 1e-9:
        return "0"
    if seconds < 0:
        return f"-{spell_seconds(-seconds)}"
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 1e-4 else "<0.0001"


def spell_bytes(count: int) -> str:
    """Return a number of bytes in the largest binary unit that leaves at least one: ``1.5 MiB``."""
    size = float(count)
    for unit in _BYTES[:-1]:
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_BYTES[-1]}"


def spell_range(span: tuple[int, int]) -> str:
    """Return a half-open range as text: ``0-7`` for (0, 8), ``7`` for (7, 8), ``none`` if empty."""
    start, stop = span
    if start == stop:
        return "none"
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def spell_numbers(numbers: Iterable[int]) -> str:
    """Return whole numbers in ascending order, runs of them as ranges.

    >>> spell_numbers([5, 0, 1, 2, 3])
    '0-3, 5'
    """
    return spell_runs(sorted(numbers))


def spell_runs(numbers: Iterable[int]) -> str:
    """Return whole numbers in their order, ascending runs of them as ranges.

    >>> spell_runs([5, 0, 1, 2, 3])
    '5, 0-3'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] = number + 1
        else:
            runs.append([number, number + 1])
    return ", ".join(spell_range((first, end)) for first, end in runs)


def first_few(items: Sequence[object], most: int = 8, comma: str = ", ") -> str:
    """Return the first of some items as text, and how many more there are.

    >>> first_few(range(10))
    '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return comma.join(map(str, items[:most])) + more
