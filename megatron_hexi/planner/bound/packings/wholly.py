"""Whether whole groups may hold all tokens, each way to pack them by itself: part of the lower bound.

Ways to pack them are found by the prices of the linear program (whole.py) and by what groups hold at most
beside each other (beside.py); those that are left are looked at together (together.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.groups.site_times import SiteClass
from megatron_hexi.planner.bound.packings.program import Program
from megatron_hexi.planner.bound.packings.whole import packings
from megatron_hexi.planner.bound.packings.worth import Way, Worth
from megatron_hexi.planner.bound.pieces.demand import Span
from megatron_hexi.planner.bound.pieces.gradients import Ring
from megatron_hexi.planner.bound.waiting.beside import Beside
from megatron_hexi.planner.bound.waiting.setting import Rings, Setting
from megatron_hexi.planner.bound.waiting.together import Tries, suffices
from megatron_hexi.planner.budget import Proof

#: Shapes that are worked out at once where there are more.
_AT_ONCE = 8
#: What the linear program's rounding may take away.
_ROUNDING = 1e-6

#: Numbers of shapes.
Packed = tuple[int, ...]


class Wholly:
    """Groups of one replica, where there are few shapes of them.

    Args:
        job: the job.
        classes: of sites.
        worth: shapes of groups and what they hold.
        ring: of gradients.
        proof: what it may take.
    """

    def __init__(
        self, job: Job, classes: Sequence[SiteClass], worth: Worth, ring: Ring, proof: Proof
    ) -> None:
        self._job, self._classes, self._worth, self._ring, self._proof = job, classes, worth, ring, proof
        self._tokens = float(job.seq_length * (job.global_batch_size // job.micro_batch_size))
        self._units = [site.size * site.count for site in classes]
        #: Pipeline stages, those together on which a layer takes the same.
        self._stages = alike_stages(classes)
        #: What sufficed in some time.
        self._sufficed: dict[tuple[Span, Way], Packed] = {}

    def sufficed(self, span: Span, way: Way) -> bool:
        """Whether some groups, so many and used so, did in the last time that was asked for."""
        return (span, way) in self._sufficed

    def suffices(self, iteration_s: float, span: Span, way: Way) -> bool:
        """Whether groups may hold all tokens in a time, as far as they are looked at.

        Args:
            iteration_s: the time.
            span: how many there are.
            way: how they are used.
        """
        layer_s, times = self._worth.layer_s(iteration_s, way[0]), self._worth.group_times(way)
        rings = Rings.of(self._job, self._ring, iteration_s, way[0])
        settings = [
            Setting(self._job, self._classes, way[2], times, layer_s, stages, rings)
            for stages in self._stages
        ]
        packed = self._packings(settings, iteration_s, span, way)
        if packed is None:
            return True
        tries, before = Tries(self._proof.programs), self._sufficed.pop((span, way), None)
        for one, most in sorted(packed, key=lambda of_one: of_one[0] != before):
            if suffices(settings, [self._worth.shapes[shape] for shape in one], most, tries):
                self._sufficed[span, way] = one
                return True
        return False

    def _packings(
        self, settings: Sequence[Setting], iteration_s: float, span: Span, way: Way
    ) -> list[tuple[Packed, Floats]] | None:
        """Every way to pack whole groups that may hold all tokens, and what each of them holds at most.

        ``None``: there are too many.
        """
        program = Program(self._worth.used, self._units, span)
        while True:
            worth, worked = (of_way[0] for of_way in self._worth.of_all(iteration_s, span, [way]))
            if program.solve(worth)[0] < self._tokens * (1 - _ROUNDING):
                return []
            prices = program.prices()
            packed = packings(
                self._worth.used,
                self._units,
                span,
                worth,
                self._tokens,
                prices,
                Beside(settings, self._worth.shapes, worth / way[0], span[0]).most,
                self._proof.packings,
            )
            open_ = sorted({shape for one, _ in packed.found for shape in one if not worked[shape]})
            if not open_ and not packed.complete:
                # What is packed most, if its best rates were all.
                loses = np.where(worked | (worth <= 0), inf, self._worth.used @ prices[0] + prices[1] - worth)
                open_ = [shape for shape in np.argsort(loses)[:_AT_ONCE].tolist() if loses[shape] < inf]
            if not open_ or len(open_) > self._worth.left:
                return packed.found if packed.complete else None
            for shape in open_:
                self._worth.work_out(shape, way)


def alike_stages(classes: Sequence[SiteClass]) -> list[list[int]]:
    """Pipeline stages by what a layer takes on them, whatever the units."""
    found: list[list[int]] = []
    for stage in range(len(classes[0].loads)):
        for alike in found:
            if all(site.loads[stage].is_like(site.loads[alike[0]]) for site in classes):
                alike.append(stage)
                break
        else:
            found.append([stage])
    return found
