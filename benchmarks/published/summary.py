"""Errors of many rows in few numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.published.predict import Comparison

#: Software since this year is today's.
_TODAY = 2024


class Errors(NamedTuple):
    """Number of rows, and their errors: median, 90th percentile and worst without signs, mean with signs."""

    rows: int
    median: float
    high: float
    worst: float
    mean: float

    def __str__(self) -> str:
        sizes = f"median {self.median:.1%}, 90th {self.high:.1%}, worst {self.worst:.1%}"
        return f"{self.rows} rows: {sizes}"


def errors(rows: Sequence[Comparison]) -> Errors:
    """Those of rows; there is at least one."""
    sizes = sorted(abs(row.error) for row in rows)
    return Errors(
        len(rows),
        statistics.median(sizes),
        sizes[math.ceil(0.9 * len(sizes)) - 1],
        sizes[-1],
        statistics.fmean(row.error for row in rows),
    )


def by_sort(rows: Sequence[Comparison]) -> Iterator[tuple[str, Errors]]:
    """Yield errors of times of training by sort, of dense models since 2024 too."""
    times = [row for row in rows if row.what == "time" and row.sort]
    for sort in dict.fromkeys(row.sort for row in times):
        own = [row for row in times if row.sort == sort]
        yield sort, errors(own)
        if sort == "dense":
            yield "dense, software since 2024", errors([row for row in own if row.year >= _TODAY])
