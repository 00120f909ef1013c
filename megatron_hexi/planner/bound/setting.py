"""What groups have in common where they are looked at together: part of the lower bound (together.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.parts import BUSY_ROWS, MOST_PARTS
from megatron_hexi.planner.bound.columns import GroupTimes
from megatron_hexi.planner.bound.site_times import SiteClass, held_in

#: Times and numbers of tokens in which tokens are looked up, and the shortest time as a part of the longest.
_TIMES, _SIZES, _SHORTEST = 6_000, 12_000, 1e-4


class Pass(NamedTuple):
    """A pass of a layer: how often it runs, 0 forward or 1 backward, and whether there is work on tokens."""

    times: int
    way: int
    tokens: bool


@dataclass(frozen=True)
class Line:
    """A straight line."""

    slope: float
    at_zero: float


class Setting:
    """What all groups have in common, on one pipeline stage.

    Args:
        job: the job.
        classes: of sites.
        halves: whether all-to-alls travel in two; ``None``: whatever is better.
        alone: times of groups that are alone.
        longest_s: of a layer; what takes longer is of no interest.
    """

    def __init__(
        self,
        job: Job,
        classes: Sequence[SiteClass],
        halves: bool | None,
        alone: GroupTimes,
        longest_s: float,
    ) -> None:
        workload = job.workload()
        self.loads, self.alone = [site.loads[0] for site in classes], alone
        self._sites = [site.count for site in classes]
        self.length, self.heads, self.width = float(job.seq_length), workload.local_heads, job.tensor_parallel
        self.causal, self.ratio = workload.causal, workload.queries_per_kv
        self.key_bytes = self.loads[0].key_bytes
        self.most_parts = 1 if halves is False else MOST_PARTS
        #: Rows that every group's busiest member has at least.
        self.rows = 2 * BUSY_ROWS if halves else 0
        passes = [Pass(2 if job.recompute == "full" else 1, 0, True), Pass(1, 1, True)]
        self.passes = passes + [Pass(1, 0, False)] * (job.recompute == "selective")
        # What shows of a pass's all-to-alls: in halves, keys and values (or their gradients) at any rate.
        columns, keys = workload.local_heads, 2 * workload.local_kv_heads
        with_keys, without = (keys, 0) if halves is not False else (columns + keys, columns)
        whole = columns + keys if halves is not False else 2 * columns + keys
        #: The part before attention, and the part after it, forward and backward.
        self.before, self.after = (with_keys / whole, without / whole), (without / whole, with_keys / whole)
        self.times = longest_s * np.geomspace(_SHORTEST, 1, _TIMES)
        #: Tokens that a unit of each class is done with in these: forward, backward, with the vocabulary.
        self.held = [self._of_class(place) for place in range(len(classes))]

    @property
    def longest_s(self) -> float:
        """Of a layer."""
        return float(self.times[-1])

    def bandwidth(self, here: int, units: float, there: int, others: float) -> float:
        """Bytes/s at most from so many units of a class to so many of another, of another group."""
        outside = min(self.lanes(here, units), self.lanes(there, others))
        if here != there:
            return outside
        inside = self.loads[here].links.inside * min(units, others)
        # Groups of a class may be on one site or on two.
        return inside if self._sites[here] == 1 else max(inside, outside)

    def _of_class(self, place: int) -> list[Floats]:
        sizes = np.geomspace(1, 2 * self.length, _SIZES)
        load, found = self.loads[place], []
        forward, backward = load.pass_seconds(sizes)
        for seconds in (forward, backward, load.logits_seconds(sizes) + np.zeros(_SIZES)):
            found.append(held_in(self.times, sizes, seconds))
        return found

    def lanes(self, place: int, units: float) -> float:
        """Bytes/s of so many units of a class to other sites; infinite where there are none."""
        links = self.loads[place].links
        if not links.outside:
            return inf
        return links.outside * (1 / self.width if links.shared else units)


def below(places: Floats, values: Floats) -> list[Line]:
    """The lower convex hull of points from left to right, as lines (Andrew's monotone chain).

    Of points at one place the lowest counts.
    """
    corners: list[tuple[float, float]] = []
    for x, y in zip(places.tolist(), values.tolist(), strict=True):
        if corners and x <= corners[-1][0]:
            y = min(y, corners.pop()[1])
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            corners.pop()
        corners.append((x, y))
    if len(corners) == 1:
        return [Line(0.0, corners[0][1])]
    slopes = [(x, y, (v - y) / (u - x)) for (x, y), (u, v) in itertools.pairwise(corners)]
    return [Line(slope, y - slope * x) for x, y, slope in slopes]
