"""Which groups the units can form at once, and how many tokens these take at most: part of the lower bound.

The bound by pieces (bound.py) lets every piece choose how large its group is. Where heads are few, memory
is scarce or a thin link is crossed, that is too much: members of a group have its tokens in common, and wait
for each other. Here whole groups are looked at: of each shape (so many units on sites of each class) the
least time (group_times.py), so the most tokens in a given time; a linear program packs shapes into the units.

There are many shapes and few in the optimum: these are worked out, so many at most (worth.py). The program
packs fractions of groups. Of one replica, groups are looked at one inside the other besides (nested.py); and
where few ways to pack whole ones are left, each by itself (wholly.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import comb, isqrt, prod
from typing import NamedTuple

from megatron_hexi.cost import Job
from megatron_hexi.plan.parts import BUSY_ROWS
from megatron_hexi.planner.bound.groups.site_times import Shape, SiteClass
from megatron_hexi.planner.bound.packings.halving import least_sufficient
from megatron_hexi.planner.bound.packings.nested import Nested
from megatron_hexi.planner.bound.packings.placing import placed
from megatron_hexi.planner.bound.packings.program import Program
from megatron_hexi.planner.bound.packings.wholly import Wholly
from megatron_hexi.planner.bound.packings.worth import ONE, Way, Worth
from megatron_hexi.planner.bound.pieces.demand import Span
from megatron_hexi.planner.bound.pieces.gradients import Ring
from megatron_hexi.planner.budget import Proof
from megatron_hexi.planner.layouts.layout import Grouping

#: Of more shapes, fewer are worked out.
_MANY_SHAPES = 1300
#: Groups whose busiest member has so many times the rows that are worth cutting in two are never too small.
_LARGE = 4
#: Of so few shapes, plans of three groups are looked at by themselves, and whole groups are packed.
_FEW_SHAPES = 320
#: What a group's depth among the nested ones costs (demand.price).
_TILTS = (0.0, 0.003, 0.006, 0.012, 0.5, 1.0)
#: Groups one inside the other and whole ones are worth while where so much is left.
_WORTH = 0.005
#: Where groups one inside the other are looked at: longer times take longer to look at.
_STEPS = (1 / 16, 1 / 8, 1 / 4)
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

    def halves(self) -> list[_Box]:
        """Two parts of it; none where it is as small as is worth while."""
        (fewest, most), cut = self.span, Nested.cut(self.span)
        if cut is None and most <= fewest + fewest // 8:
            return []
        first = cut or (fewest, isqrt(fewest * most))
        return [self._replace(span=span) for span in (first, (first[1] + 1, most))]


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
        self._classes, self._turns = classes, turns
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
        self._of_interest = of_interest
        many = len(self._shapes) > _MANY_SHAPES
        left = proof.few_shapes if few else proof.many_shapes if many else proof.shapes
        self._worth = Worth(job, classes, self._shapes, turns, ring, of_interest, left)
        self._wholly = Wholly(job, classes, self._worth, ring, proof) if few and not several else None
        self._nested: Nested | None = None
        if proof.nested and not several and most > 1 and Nested.is_small(self._units):
            self._nested = Nested(job, self._worth, self._units, proof.nested)
        self._programs: dict[Span, Program] = {}
        #: What no plan of a box stays below, by fractions of groups.
        self._least: dict[_Box, float] = {}

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

    def closely_least_s(self, longest_s: float) -> float:
        """The same by groups one inside the other, and by whole ones where these are few; after `least_s`.

        Args:
            longest_s: up to this time.
        """
        low = min(self._least.values())
        self._worth.up_to(longest_s)
        if self._nested and longest_s > (1 + _WORTH) * low:
            nested = partial(self._any, self._nested_suffices)
            low = least_sufficient(nested, low, longest_s, _PRECISION, _STEPS)
        if self._wholly and longest_s > (1 + _WORTH) * low:
            low = least_sufficient(partial(self._any, self._wholly_suffices), low, longest_s, _PRECISION)
        return min(low, longest_s)

    def _any(self, suffices: Callable[[float, _Box], bool], iteration_s: float) -> bool:
        """Whether any box does: what was enough in more time comes first, then what allows most."""
        boxes = sorted(self._least, key=lambda box: (not self._sufficed(box), self._least[box]))
        return any(self._least[box] < iteration_s and suffices(iteration_s, box) for box in boxes)

    def _sufficed(self, box: _Box) -> bool:
        return self._wholly is not None and self._wholly.sufficed(box.span, *self._ways(box))

    def _closely_suffices(self, iteration_s: float, box: _Box) -> bool:
        """Whether groups of a box may hold all tokens in the time, by all that there is."""
        nested = self._nested is None or self._nested_suffices(iteration_s, box)
        return nested and self._wholly_suffices(iteration_s, box)

    def _wholly_suffices(self, iteration_s: float, box: _Box) -> bool:
        """Whether whole groups of a box may hold all tokens in the time."""
        return self._wholly is None or self._wholly.suffices(iteration_s, box.span, *self._ways(box))

    def _nested_suffices(self, iteration_s: float, box: _Box) -> bool:
        """Whether groups of a box may hold all tokens in the time, one inside the other."""
        if not self._may_be_nested(iteration_s, box):
            self._least[box] = iteration_s
            return False
        halves = box.halves()
        if halves:
            self._least |= dict.fromkeys(halves, self._least.pop(box, 0.0))
        return not halves or any(self._nested_suffices(iteration_s, half) for half in halves)

    def _may_be_nested(self, iteration_s: float, box: _Box) -> bool:
        """The same of a box that is not cut."""
        if self._nested is None or box.span == ONE:
            return self._suffices(iteration_s, box)
        if Nested.cut(box.span) is not None:
            return True
        return self._nested.suffices(iteration_s, box.span, *self._ways(box))

    def suffices(self, iteration_s: float, closely: bool) -> bool:
        """Whether groups may hold all tokens in the time, which is not longer than the longest.

        Args:
            iteration_s: the time.
            closely: whether to look at groups one inside the other, and at whole ones where these are few.
        """
        return any(
            self._suffices(iteration_s, box) and (not closely or self._closely_suffices(iteration_s, box))
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

    def _program(self, span: Span) -> Program:
        """For the second time, it begins with what it found last."""
        if span not in self._programs:
            self._programs[span] = Program(self._worth.used, self._units, span)
        return self._programs[span]

    def _ways(self, box: _Box) -> list[Way]:
        return list(itertools.product(self._turns, box.groups, [box.half]))

    def _suffices(self, iteration_s: float, box: _Box) -> bool:
        """Whether groups may hold all tokens in the time, as far as worked out."""
        return all(self._pack(iteration_s, box.span, self._ways(box), tilt) for tilt in _TILTS)

    def _pack(self, iteration_s: float, span: Span, ways: Sequence[Way], tilt: float) -> bool:
        """The same for one price of a group's depth."""
        worth, worked = self._worth.of_all(iteration_s, span, ways, tilt)
        program = self._program(span)
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


def packable(classes: Sequence[SiteClass], most: int) -> bool:
    """Whether there are no more shapes than that."""
    return prod(comb(site.size + site.count, site.count) for site in classes) <= most


def shapes_of(classes: Sequence[SiteClass]) -> Iterator[Shape]:
    """Every choice of units on sites, up to exchanging sites of a class."""
    choices = [
        itertools.combinations_with_replacement(range(site.size, -1, -1), site.count) for site in classes
    ]
    for chosen in itertools.product(*choices):
        shape = tuple((place, units) for place, of_class in enumerate(chosen) for units in of_class if units)
        if shape:
            yield shape
