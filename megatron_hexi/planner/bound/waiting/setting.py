"""What groups have in common where they are looked at together: part of the lower bound (together.py)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.parts import BUSY_ROWS, MOST_PARTS
from megatron_hexi.planner.bound.groups.group_times import GroupTimes
from megatron_hexi.planner.bound.groups.site_times import SiteClass, held_in
from megatron_hexi.planner.bound.pieces.gradients import Ring

#: Units of a group on a site: their class, and how many.
Units = tuple[int, int]
#: Times and numbers of tokens in which tokens are looked up, and the shortest time as a part of the longest.
_TIMES, _SIZES, _SHORTEST = 6_000, 12_000, 1e-4


class Pass(NamedTuple):
    """A pass of a layer: how often it runs, 0 forward or 1 backward, and whether there is work on tokens."""

    times: int
    way: int
    tokens: bool


class Rings(NamedTuple):
    """Gradients and weights, which hide behind a layer's passes where these leave the wire free.

    Args:
        behind: passes, 0 forward and 1 backward, and a layer's part of the seconds that are to hide.
        layers: the part of one of them shows at any rate.
        turns: micro-batches that they are waited for once in.
        longest_s: of a layer, what shows of them included; on average of all micro-batches.
    """

    behind: Sequence[tuple[int, float]]
    layers: int
    turns: int
    longest_s: float

    @classmethod
    def of(cls, job: Job, ring: Ring, iteration_s: float, count: int) -> Rings | None:
        """Behind a replica of so many micro-batches; ``None``: nothing hides, or it is a pipeline's."""
        if job.pipeline_parallel > 1 or not ring.behind:
            return None
        layers = job.stage_layers
        behind = [(way, seconds / layers) for way, seconds in ring.behind]
        return cls(behind, layers, count, (iteration_s - ring.step) / (count * layers))


class Setting:
    """What all groups have in common, on pipeline stages that are alike.

    Times are those of a layer on average of all stages. The vocabulary, which only the last one has, comes
    with its part of that.

    Args:
        job: the job.
        classes: of sites.
        halves: whether all-to-alls travel in two; ``None``: whatever is better.
        alone: times of groups that are alone.
        longest_s: of a layer, on average; what takes longer is of no interest.
        stages: of the pipeline.
        rings: of gradients and weights; ``None``: what shows of them has been taken off.
    """

    #: Steps of the exchange under way: one; two or more; ``None``: whatever is better.
    window: int | None = None

    def __init__(
        self,
        job: Job,
        classes: Sequence[SiteClass],
        halves: bool | None,
        alone: GroupTimes,
        longest_s: float,
        stages: Sequence[int] = (0,),
        rings: Rings | None = None,
    ) -> None:
        workload = job.workload()
        self.taken = alone.taken(window=1)
        self.loads, self.alone = [site.loads[stages[0]] for site in classes], alone
        #: What these stages are of a layer's time; and the longest of theirs, if the others took none.
        self.weight = float(alone.weights[list(stages)].sum())
        self.average_s, self.longest_s, self.rings = longest_s, longest_s / self.weight, rings
        self._last, self._in_halves = [site.loads[-1] for site in classes], halves is not False
        self._classes = classes
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
        #: How much longer all-to-alls use a wire than what shows of them.
        self.whole_ratio = (2 * columns + keys) / whole
        #: The part before attention, and the part after it, forward and backward.
        self.before, self.after = (with_keys / whole, without / whole), (without / whole, with_keys / whole)
        self.times = self.longest_s * np.geomspace(_SHORTEST, 1, _TIMES)
        #: Tokens that a unit of each class is done with in these: forward, backward, with the vocabulary.
        self.held = [self._of_class(place) for place in range(len(classes))]

    def with_window(self, window: int) -> Setting:
        """The same with so many steps of the exchange under way."""
        other = copy.copy(self)
        other.window, other.taken = window, self.alone.taken(window)
        return other

    def may_meet(self, one: Units, other: Units) -> bool:
        """Whether units of two groups may be on the same site: there is room for both."""
        return one[0] == other[0] and one[1] + other[1] <= self._classes[one[0]].size

    def bandwidth(self, one: Units, other: Units, busy: tuple[float, float] | None = None) -> float:
        """Bytes/s at most from units of a group to units of another one.

        Args:
            one: units of the one group.
            other: of the other.
            busy: so many as are as busy as if their group's heads were spread evenly; ``None``: all.
        """
        (here, units), (there, others) = one, other
        many, more = busy or (units, others)
        outside = min(self.lanes(here, many), self.lanes(there, more))
        if not self.may_meet(one, other):
            return outside
        inside = self.loads[here].links.inside * min(many, more)
        # Groups of a class may be on one site or on two.
        return inside if self._classes[here].count == 1 else max(inside, outside)

    def moving(self, place: int, units: int, outside: bool) -> tuple[float, float]:
        """All-to-alls of a pass: seconds a token that so many units of a class move, and latency."""
        load = self.loads[place]
        each, latency = load.moving(units, outside, self._in_halves)
        return each / (load.again + 1), latency / (load.again + 1)

    def _of_class(self, place: int) -> list[Floats]:
        sizes = np.geomspace(1, 2 * self.length, _SIZES)
        load, found = self.loads[place], []
        forward, backward = load.pass_seconds(sizes)
        logits = self.alone.weights[-1] * self._last[place].logits_seconds(sizes)
        for seconds in (forward, backward, logits + np.zeros(_SIZES)):
            found.append(held_in(self.times, sizes, seconds))
        return found

    def lanes(self, place: int, units: float) -> float:
        """Bytes/s of so many units of a class to other sites; infinite where there are none."""
        links = self.loads[place].links
        if not links.outside:
            return inf
        return links.outside * (1 / self.width if links.shared else units)
