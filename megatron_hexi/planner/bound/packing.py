"""Which groups the units can form at once, and how many tokens these take at most: part of the lower bound.

The bound by pieces (bound.py) lets every piece choose how large its group is. Where heads are few, memory
is scarce or a thin link is crossed, that is too much: members of a group have its tokens in common, and wait
for each other. Here whole groups are looked at: of each shape (so many units on sites of each class) the
least time (columns.py), so the most tokens in a given time; a linear program packs shapes into the units.

There are many shapes and few in the optimum: these are worked out, so many at most (worth.py). The program
packs fractions of groups; where few ways to pack whole ones are left, each is looked at by itself (whole.py,
beside.py, together.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from math import comb, inf, prod
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.parts import BUSY_ROWS
from megatron_hexi.planner.bound.beside import Beside
from megatron_hexi.planner.bound.demand import Span
from megatron_hexi.planner.bound.gradients import Ring
from megatron_hexi.planner.bound.halving import least_sufficient
from megatron_hexi.planner.bound.placing import placed
from megatron_hexi.planner.bound.program import Program
from megatron_hexi.planner.bound.setting import Rings, Setting
from megatron_hexi.planner.bound.site_times import Shape, SiteClass
from megatron_hexi.planner.bound.together import Tries, suffices
from megatron_hexi.planner.bound.whole import packings
from megatron_hexi.planner.bound.worth import ONE, Way, Worth
from megatron_hexi.planner.budget import Proof
from megatron_hexi.planner.layout import Grouping

#: Up to so many shapes are packed.
_MOST_SHAPES = 1300
#: Groups whose busiest member has so many times the rows that are worth cutting in two are never too small.
_LARGE = 4
#: Of so few shapes, plans of three groups are looked at by themselves, and whole groups are packed.
_FEW_SHAPES = 320
#: What a group's depth among the nested ones costs (demand.price).
_TILTS = (0.0, 0.003, 0.006, 0.012, 0.5, 1.0)
#: The bound is found to this part by ways to pack whole groups.
_CLOSE = 1.5e-3
#: Shapes that are worked out at once where there are more.
_AT_ONCE = 8
#: That is worth while where so much is left.
_WORTH = 0.005
#: The bound is found to this part; what the linear program's rounding may take away.
_PRECISION, _ROUNDING = 3e-4, 1e-6


class _Box(NamedTuple):
    """Plans that are looked at together.

    Args:
        span: the fewest and the most groups that they have in all.
        groups: what each replica may have of them.
        half: whether all-to-alls travel in halves.
    """

    span: Span
    groups: Sequence[Span]
    half: bool | None


class Packing:
    """All micro-batches of an iteration, by groups of all shapes.

    Args:
        job: the job.
        classes: of sites.
        turns: micro-batches that a replica may take.
        several: whether there are several replicas.
        ring: of gradients.
        of_interest: seconds of an iteration that no plan stays below, and such that are known to be possible.
        proof: what it may take.
    """

    def __init__(
        self,
        job: Job,
        classes: Sequence[SiteClass],
        turns: Sequence[int],
        several: bool,
        ring: Ring,
        of_interest: tuple[float, float],
        proof: Proof,
    ) -> None:
        self._job, self._classes, self._turns, self._proof = job, classes, turns, proof
        self._tokens = float(job.seq_length * (job.global_batch_size // job.micro_batch_size))
        self._shapes = list(shapes_of(classes))
        self._units = [site.size * site.count for site in classes]
        most = sum(self._units)
        few = len(self._shapes) <= _FEW_SHAPES
        more = [(3, 3), (4, most)] if few else [(3, most)]
        self._spans = [(least, many) for least, many in (ONE, (2, 2), *more) if least <= many <= most]
        boxes = [((1, most), tuple(self._spans))] if several else [(span, (span,)) for span in self._spans]
        # Rows of a group's busiest member, where tokens and heads are even.
        rows = job.seq_length * job.workload().local_heads / most
        self._halves: list[bool | None] = [None] if rows > _LARGE * 2 * BUSY_ROWS else [False, True]
        self._boxes = [_Box(span, groups, half) for half in self._halves for span, groups in boxes]
        self._wholly = few and not several
        #: Pipeline stages, those together on which a layer takes the same.
        self._stages = alike_stages(classes)
        self._of_interest, self._ring = of_interest, ring
        left = proof.few_shapes if few else proof.shapes
        self._worth = Worth(job, classes, self._shapes, turns, ring, of_interest, left)
        #: What no plan of a box stays below, by fractions of groups.
        self._least: dict[_Box, float] = {}
        #: Whole groups that suffice in some time.
        self._sufficed: dict[_Box, tuple[int, ...]] = {}

    def least_s(self) -> float:
        """Seconds that no plan stays below: by fractions of groups."""
        least, found = self._of_interest
        for box in self._boxes:
            self._least[box] = found
            if least < found and self._suffices(found, box):
                self._least[box] = least_sufficient(
                    partial(self._suffices, box=box), least, found, _PRECISION
                )
            found = min(found, self._least[box])
        return found

    def wholly_least_s(self, longest_s: float) -> float:
        """The same by whole groups, where these are few, up to a time; after `least_s`."""
        low = min(self._least.values())
        if not self._wholly or longest_s <= (1 + _WORTH) * low:
            return min(low, longest_s)
        return least_sufficient(self._any_suffices, low, longest_s, _CLOSE)

    def _any_suffices(self, iteration_s: float) -> bool:
        # What was enough in more time comes first, then what allows most by fractions.
        boxes = sorted(self._boxes, key=lambda box: (box not in self._sufficed, self._least[box]))
        return any(
            self._least[box] < iteration_s and self._wholly_suffices(iteration_s, box) for box in boxes
        )

    def _wholly_suffices(self, iteration_s: float, box: _Box) -> bool:
        """Whether whole groups may hold all tokens in the time, as far as these are looked at."""
        [way] = self._ways(box)
        layer_s, times = self._worth.layer_s(iteration_s, way[0]), self._worth.group_times(way)
        rings = Rings.of(self._job, self._ring, iteration_s, way[0])
        settings = [
            Setting(self._job, self._classes, way[2], times, layer_s, stages, rings)
            for stages in self._stages
        ]
        packed = self._packings(settings, iteration_s, box.span, way)
        if packed is None:
            return True
        tries, before = Tries(self._proof.programs), self._sufficed.pop(box, None)
        for one, most in sorted(packed, key=lambda of_one: of_one[0] != before):
            if suffices(settings, [self._shapes[shape] for shape in one], most, tries):
                self._sufficed[box] = one
                return True
        return False

    def _packings(
        self, settings: Sequence[Setting], iteration_s: float, span: Span, way: Way
    ) -> list[tuple[tuple[int, ...], Floats]] | None:
        """Every way to pack whole groups that may hold all tokens, and what each of them holds at most.

        ``None``: there are too many.
        """
        while True:
            worth, worked = (of_way[0] for of_way in self._worth.of_all(iteration_s, span, [way]))
            program = Program(self._worth.used, self._units, span)
            if program.solve(worth)[0] < self._tokens * (1 - _ROUNDING):
                return []
            prices = program.prices()
            beside = Beside(settings, self._shapes, worth / way[0], span[0])
            packed = packings(
                self._worth.used,
                self._units,
                span,
                worth,
                self._tokens,
                prices,
                beside.most,
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

    def suffices(self, iteration_s: float, closely: bool) -> bool:
        """Whether groups may hold all tokens in the time, which is not longer than the longest.

        Args:
            iteration_s: the time.
            closely: whether to look at whole groups where these are few.
        """
        return any(
            self._suffices(iteration_s, box)
            and not (closely and self._wholly and not self._wholly_suffices(iteration_s, box))
            for box in self._boxes
        )

    def groupings(self, iteration_s: float) -> Iterator[Grouping]:
        """Whole groups that hold most in a time: candidates for a plan of one replica on all units.

        That takes the most micro-batches that any may. All units as one group are no news.
        """
        for half, span in itertools.product(self._halves, self._spans[1:]):
            way = max(self._turns), span, half
            while True:
                worth, worked = (of_way[0] for of_way in self._worth.of_all(iteration_s, span, [way]))
                packed = Program(self._worth.used, self._units, span).whole(worth)
                open_ = sorted({shape for shape in packed if not worked[shape]})
                if not open_ or self._worth.left < len(open_):
                    break
                for shape in open_:
                    self._worth.work_out(shape, way)
            if packed:
                yield placed(self._classes, [self._shapes[number] for number in packed])

    def _ways(self, box: _Box) -> list[Way]:
        return list(itertools.product(self._turns, box.groups, [box.half]))

    def _suffices(self, iteration_s: float, box: _Box) -> bool:
        """Whether groups may hold all tokens in the time, as far as worked out."""
        return all(self._pack(iteration_s, box.span, self._ways(box), tilt) for tilt in _TILTS)

    def _pack(self, iteration_s: float, span: Span, ways: Sequence[Way], tilt: float) -> bool:
        """The same for one price of a group's depth."""
        worth, worked = self._worth.of_all(iteration_s, span, ways, tilt)
        program = Program(self._worth.used, self._units, span)
        while True:
            total, packed = program.solve(worth.max(axis=0))
            if total < self._tokens * (1 - _ROUNDING):
                return False
            best = worth.argmax(axis=0)
            open_ = [shape for shape in packed if not worked[best[shape], shape]]
            if not open_ or self._worth.left < len(open_):
                return True
            for shape in open_:
                place = int(best[shape]), shape
                self._worth.work_out(shape, ways[place[0]])
                found = self._worth.of_one(iteration_s, shape, ways[place[0]], tilt)
                worth[place], worked[place] = min(worth[place], found), True


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


def packable(classes: Sequence[SiteClass]) -> bool:
    """Whether there are few enough shapes."""
    return prod(comb(site.size + site.count, site.count) for site in classes) <= _MOST_SHAPES


def shapes_of(classes: Sequence[SiteClass]) -> Iterator[Shape]:
    """Every choice of units on sites, up to exchanging sites of a class."""
    choices = [
        itertools.combinations_with_replacement(range(site.size, -1, -1), site.count) for site in classes
    ]
    for chosen in itertools.product(*choices):
        shape = tuple((place, units) for place, of_class in enumerate(chosen) for units in of_class if units)
        if shape:
            yield shape
