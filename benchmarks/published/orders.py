"""Layouts of one job in order: as published, and as the cost model ranks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import correlation, fmean
from typing import NamedTuple

from benchmarks.published.predict import Comparison

#: Two layouts have an order by chance.
_LEAST = 3


class Order(NamedTuple):
    """The model's order of the layouts of one job, beside the published one.

    Attributes:
        table: its table's name.
        job: what was trained on what.
        layouts: how many there are; repeats of one count once, by their mean.
        correlation: Spearman's, of published and predicted times.
        first: the layout that the model takes for the fastest.
        regret: how much longer that one took than the fastest as published, as a part.
    """

    table: str
    job: str
    layouts: int
    correlation: float
    first: str
    regret: float


def orders(rows: Sequence[Comparison]) -> Iterator[Order]:
    """Yield the order of each job of a table that was published with three layouts or more."""
    times = [row for row in rows if row.what == "time" and row.job]
    for job in dict.fromkeys(row.job for row in times):
        own = [row for row in times if row.job == job]
        layouts = list(dict.fromkeys(row.row for row in own))
        if len(layouts) < _LEAST:
            continue
        published, predicted = (
            [fmean(_time(row, which) for row in own if row.row == layout) for layout in layouts]
            for which in ("published", "predicted")
        )
        first = predicted.index(min(predicted))
        yield Order(
            own[0].table,
            job,
            len(layouts),
            correlation(published, predicted, method="ranked"),
            layouts[first],
            published[first] / min(published) - 1,
        )


def _time(row: Comparison, which: str) -> float:
    """Seconds, or what is proportional to them."""
    value: float = getattr(row, which)
    return value if row.unit == "s" else 1 / value
