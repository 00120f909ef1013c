"""What groups of each shape hold at most in a time, worked out where it matters: part of the lower bound.

There are many shapes and few in an optimum (packing.py): a shape's tokens are bounded by its best rates until
it is worked out. Any stage of that is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Bools, Floats
from megatron_hexi.planner.bound.groups.group_times import GroupTimes
from megatron_hexi.planner.bound.groups.site_times import Shape, SiteClass, used
from megatron_hexi.planner.bound.pieces.demand import Span
from megatron_hexi.planner.bound.pieces.gradients import Ring

#: Bounds of tokens between which a shape's time is worked out, as parts of the most by its rates: close
#: together above a half, where shapes of the optimum are, and closest where these are at long contexts.
_BOUNDS = np.concatenate(
    [
        np.geomspace(0.005, 0.1, 8, endpoint=False),
        np.geomspace(0.1, 0.5, 40, endpoint=False),
        np.linspace(0.5, 0.85, 56, endpoint=False),
        np.linspace(0.85, 1, 161),
    ]
)
#: Where a group may be among the nested ones.
_DEPTHS = tuple((number / 4, (number + 1) / 4) for number in range(4))
#: Micro-batches of a replica, the fewest and the most groups of it, and whether all-to-alls travel in halves
#: (`None`: whatever is better): how a group is used.
Way = tuple[int, Span, bool | None]
ONE: Span = (1, 1)


class Worth:
    """Shapes of groups and what they hold.

    Args:
        job: the job.
        classes: of sites.
        shapes: of groups.
        turns: micro-batches that a replica may take.
        ring: of gradients.
        of_interest: seconds of an iteration that no plan stays below, and such that are known to be possible.
        left: how many times a shape may be worked out.
    """

    def __init__(
        self,
        job: Job,
        classes: Sequence[SiteClass],
        shapes: Sequence[Shape],
        turns: Sequence[int],
        ring: Ring,
        of_interest: tuple[float, float],
        left: int,
    ) -> None:
        self._job, self._classes, self._turns, self._ring = job, classes, turns, ring
        self.left = left
        self._length = float(job.seq_length)
        #: Shapes, and units of each class that they use, [shapes, classes].
        self.shapes, self.used = shapes, used(shapes, len(classes))
        self._all_units = sum(site.size * site.count for site in classes)
        #: Of a layer, by micro-batches of a replica.
        self._of_interest = {
            count: (self.layer_s(of_interest[0], count), self.layer_s(of_interest[1], count))
            for count in turns
        }
        self._times: dict[tuple[int, Span, bool | None, int | None], GroupTimes] = {}
        #: Of shapes that are worked out: bounds of tokens, [I + 1], and least seconds by depth, [D, I].
        self._found: dict[tuple[int, Way], tuple[Floats, Floats]] = {}

    def up_to(self, iteration_s: float) -> None:
        """From now on, longer times are of no interest: bounds of tokens come to lie closer together."""
        for count, (shortest_s, longest_s) in self._of_interest.items():
            self._of_interest[count] = shortest_s, min(longest_s, self.layer_s(iteration_s, count))

    def layer_s(self, iteration_s: float, count: int) -> float:
        """Seconds of a layer, of a replica of so many micro-batches."""
        stages = self._job.pipeline_parallel
        return self._ring.micro_batch_s(iteration_s, count, stages) / self._job.stage_layers

    def of_all(
        self, iteration_s: float, span: Span, ways: Sequence[Way], tilt: float = 0.0
    ) -> tuple[Floats, Bools]:
        """Tokens that shapes hold at most as far as is known, and whether it is worked out, [ways, shapes].

        Args:
            iteration_s: the time.
            span: the fewest and the most groups of all replicas together.
            ways: how groups are used.
            tilt: how much less a deep group's tokens count.
        """
        worth = np.array([self._by_rates(way, self.layer_s(iteration_s, way[0])) for way in ways])
        worth *= 1 + tilt / 2
        if span == ONE:  # more units are no worse: of a single group only the largest counts
            worth *= self.used.sum(axis=1) == self._all_units
        worked = np.zeros(worth.shape, dtype=np.bool_)
        for shape, way in self._found:
            if way in ways:
                place = ways.index(way), shape
                worth[place] = min(worth[place], self.of_one(iteration_s, shape, way, tilt))
                worked[place] = True
        return worth, worked

    def of_one(self, iteration_s: float, shape: int, way: Way, tilt: float) -> float:
        """The same of a shape that is worked out."""
        count, groups, _ = way
        tokens, seconds = self._found[shape, way]
        fits = seconds <= self.layer_s(iteration_s, count)
        if groups == ONE:
            return count * float(tokens[0]) * bool(fits.any())
        most = np.where(fits, tokens[1:], tokens[0]).max(axis=1)
        return count * max(
            float(one) * (1 - tilt * (shallowest - 0.5))
            for one, (shallowest, _) in zip(most, _DEPTHS, strict=True)
        )

    def work_out(self, shape: int, way: Way) -> None:
        """Find the least time of a shape's groups, between each two bounds of tokens, by depth."""
        self.left -= 1
        times, units = self.group_times(way), self.shapes[shape]
        if way[1] == ONE:
            tokens = np.array([self._length])
            self._found[shape, way] = tokens, times.least(units, tokens, [(0.0, 1.0)])
            return
        most = min(self._length, float(times.by_rates(self._of_interest[way[0]][1])[shape]))
        tokens = most * _BOUNDS
        self._found[shape, way] = tokens, times.least(units, tokens, _DEPTHS)

    def longest_s(self, way: Way) -> float:
        """The longest time of interest, of a layer."""
        return self._of_interest[way[0]][1]

    def most(self, shape: int, way: Way) -> float:
        """Tokens that a shape holds at most in that time."""
        most = min(self._length, float(self.group_times(way).by_rates(self.longest_s(way))[shape]))
        if (shape, way) in self._found:
            tokens, seconds = self._found[shape, way]
            most = min(most, float(np.where(seconds <= self.longest_s(way), tokens[1:], tokens[0]).max()))
        return most

    def group_times(self, way: Way, one: int | None = None) -> GroupTimes:
        """Seconds of groups that are used so; only of a forward (0) or a backward (1) pass."""
        _, groups, half = way
        # Without a pipeline, micro-batches are alike.
        count = way[0] if self._job.pipeline_parallel > 1 else self._turns[0]
        if (count, groups, half, one) not in self._times:
            self._times[count, groups, half, one] = GroupTimes(
                self._job, self._classes, self.shapes, count, groups, self._of_interest[count], half, one
            )
        return self._times[count, groups, half, one]

    def _by_rates(self, way: Way, layer_s: float) -> Floats:
        """Tokens that each shape takes at most by its best rates and all its memory, in all micro-batches."""
        count, groups, _ = way
        tokens = np.minimum(self.group_times(way).by_rates(layer_s), self._length)
        # A replica's only group has them all.
        return count * (np.where(tokens < self._length, 0.0, tokens) if groups == ONE else tokens)
