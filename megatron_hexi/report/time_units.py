"""Times as text in a suitable unit: 17.3 min rather than 1,040 s, 12.5 ms rather than 0.0125 s."""

from __future__ import annotations

from typing import NamedTuple


class TimeUnit(NamedTuple):
    """A unit of time.

    Args:
        seconds: seconds of one such unit.
        name: name of the unit behind a number.
        word: name of the unit below an axis.
    """

    seconds: float
    name: str
    word: str


#: Units with the least seconds for each: below ten minutes people count seconds, below two hours minutes.
_UNITS = (
    (2 * 86400, TimeUnit(86400, "days", "days")),
    (2 * 3600, TimeUnit(3600, "h", "hours")),
    (600, TimeUnit(60, "min", "minutes")),
    (1, TimeUnit(1, "s", "seconds")),
    (1e-3, TimeUnit(1e-3, "ms", "milliseconds")),
    (0, TimeUnit(1e-6, "µs", "microseconds")),
)


def time_unit(seconds: float) -> TimeUnit:
    """Return the unit for a time, or for times of which it is the longest."""
    return next(unit for least, unit in _UNITS if seconds >= least)


def spell_time(seconds: float, unit: TimeUnit | None = None) -> str:
    """Return a time in three digits with its unit: ``17.3 min``, ``405 s``, ``12.5 ms``; ``0 s`` for zero.

    Args:
        seconds: 0 or more.
        unit: the unit; ``None``: a suitable one.
    """
    if seconds == 0 and unit is None:
        return "0 s"
    unit = unit or time_unit(seconds)
    count = seconds / unit.seconds
    return f"{count:,.0f} {unit.name}" if count >= 99.95 else f"{count:.3g} {unit.name}"
