"""Errors of many rows in few numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.published.predict import Comparison


class Errors(NamedTuple):
    """Of some rows: how many there are, median and worst without signs, and the mean with them."""

    rows: int
    median: float
    worst: float
    mean: float


def errors(rows: Sequence[Comparison]) -> Errors:
    """Those of rows; there is at least one."""
    sizes = [abs(row.error) for row in rows]
    return Errors(
        len(rows), statistics.median(sizes), max(sizes), statistics.fmean(row.error for row in rows)
    )
