"""Seconds of 1F1B in closed form, for searches: an upper bound of those pass by pass (`pipeline.py`)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.phases import Phases


def phases_of_1f1b(stages: Sequence[Phases], there: Floats, back: Floats, micro_batches: int) -> Phases:
    """Return an upper bound of the seconds of a replica by phase.

        sum of all stages and borders + (micro-batches - 1) x period

    The first micro-batch runs through all stages; each other one follows a period later (`period_s`).
    """
    totals = np.array([phases.total for phases in stages])
    slowest = int(np.argmax(totals))
    others = float(totals.sum() - totals[slowest])
    period = period_s(totals, there, back, micro_batches)
    shown = float((there + back).sum()) + (micro_batches - 1) * (period - float(totals[slowest]))
    return stages[slowest] * micro_batches + Phases(bubble=others, pipeline=shown)


def period_s(stages: ArrayLike, there: ArrayLike, back: ArrayLike, micro_batches: int) -> float:
    """Return the seconds from one micro-batch of a 1F1B pipeline to the next.

    They are the largest of: the seconds of the slowest stage; the seconds of a border that is always busy;
    and for n neighbouring stages the seconds of a micro-batch through them and back, sends included, divided
    by the number of micro-batches in flight there, n.

    Args:
        stages: seconds of a micro-batch in each stage, forward and backward, [p].
        there: seconds that activations are in transit over each border while both stages compute, [p - 1].
        back: seconds that gradients are in transit over each border, [p - 1].
    """
    # Plain numbers, since of few stages numpy's calls take longer than the sums.
    totals, forth, return_ = (np.asarray(values, dtype=float).tolist() for values in (stages, there, back))
    period: float = max(totals)
    if not any(forth) and not any(return_):
        return period
    period = max(period, *forth, *return_)
    way = [0.0, *itertools.accumulate(totals)]
    sent = [0.0, *itertools.accumulate(map(operator.add, forth, return_))]
    for length in range(2, min(len(totals), micro_batches - 1) + 1):
        rows = (
            way[first + length] - way[first] + sent[first + length - 1] - sent[first]
            for first in range(len(totals) - length + 1)
        )
        period = max(period, max(rows) / length)
    return period
