"""What units can do at most in a time: the relaxed plan of bound.py, priced by Lagrangian duality."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.pieces.gradients import Limits, Ring
from megatron_hexi.planner.bound.pieces.piece import Pieces, hold_more

#: The bound is found to this part.
_PRECISION = 1e-4
#: Parts of the time between what a whole box takes and what is given in which an answer is looked for.
_LATER = (0.2, 1.0)
#: What rounding may take away.
_ROUNDING = 1e-9
#: What a group's depth among the nested ones may be.
ANY_DEPTH = [(0.0, 1.0)]
#: The highest price of depth that is looked at.
_STEEPEST = 0.9
#: Depths are looked at where they change what can be done by this part.
_MATTERS = 0.001
#: Sections of the interval in which the price of a group is sought.
_SECTIONS = 18
#: Where between the prices by time and by memory scarce memory is priced.
_SCARCE = (0.25, 0.5, 0.75, 1.0)
#: What uses the wire, as a part of the time that there is for it, is told apart in so many octaves.
_WIRES = 8
_STEP = 1 / 2

#: The fewest and the most groups; the least and the greatest depth; what units of a kind can do.
Span = tuple[int, int]
_Depth = tuple[float, float]
_Offer = tuple[int, Floats, Floats, Floats]


@dataclass(frozen=True)
class Box:
    """Plans that are alike.

    Args:
        groups: the fewest and the most.
        wire: how much of the wire is in use, from the most, 0, to the least, `_WIRES`, in steps of `_STEP`.
    """

    groups: Span
    wire: Span = (0, _WIRES)

    @property
    def wires(self) -> tuple[float, float]:
        """The least and the most of the time for it that uses the wire."""
        most, least = self.wire
        return 0.0 if least == _WIRES else _STEP**least, 1.0 if most == 0 else _STEP**most

    def halves(self, by_wire: bool) -> list[Box]:
        """Two parts of it; none where it is as small as is worth while."""
        fewest, most = self.groups
        if most - fewest > fewest // 12:
            middle = isqrt(fewest * most)
            return [replace(self, groups=(fewest, middle)), replace(self, groups=(middle + 1, most))]
        first, last = self.wire
        if by_wire and last - first > 1:
            middle = (first + last) // 2
            return [replace(self, wire=(middle, last)), replace(self, wire=(first, middle))]
        return []


@dataclass(frozen=True, eq=False)
class Site:
    """Units that are alike.

    Args:
        sites: those of each site.
        pieces: what they can be.
        tokens_per_s: of each at its best.
        extra: what more than by `pieces` they may be worth, as a part (prices.py).
        most: up to which part of a token's price for holding it, holding more and attending to fewer does not
            pay.
    """

    sites: Sequence[Sequence[int]]
    pieces: Pieces
    tokens_per_s: float
    extra: float = 0.0
    most: float = 1.0

    @property
    def units(self) -> int:
        """How many there are."""
        return sum(map(len, self.sites))


@dataclass(frozen=True, eq=False)
class Demand:
    """All micro-batches of an iteration.

    Args:
        job: the job.
        sites: the units.
        turns: micro-batches that a replica may take.
        ring: what each replica waits for besides.
        several: whether there are several replicas.
        prices: parts of a token's price that are for holding it; at each of them a unit has nothing to gain
            by holding more or fewer tokens than it attends to, but where memory is full.
        depths: intervals in which a group's depth among the nested ones is looked at.
        more_turns: whether a replica may also take more than any of `turns`.
    """

    job: Job
    sites: Sequence[Site]
    turns: Sequence[int]
    ring: Ring
    several: bool
    prices: Sequence[float]
    depths: int
    more_turns: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.job.seq_length * (self.job.global_batch_size // self.job.micro_batch_size)

    def least_s(self, box: Box, low: float, high: float) -> float:
        """Seconds, between two, that no plan of a box stays below."""
        # The answer is often hardly later than for the box as a whole: at such a time, parts of it are ruled
        # out sooner.
        spare = high - high / max(1.0, self.reach(high, box))
        for later in _LATER:
            aim = high - (1 - later) * spare
            if aim > low:
                least = self._cut(box, low, aim)
                if least < aim:
                    return least
                low = aim
        return high

    def _cut(self, box: Box, low: float, high: float) -> float:
        """The same by branch and bound."""
        least, open_boxes, number = high, [(0.0, 0, box)], itertools.count(1)
        while open_boxes:
            _, _, box = heapq.heappop(open_boxes)
            reach = self.reach(least, box)
            if reach < 1:
                continue
            by_wire = self.job.pipeline_parallel == 1 and self.ring.may_show(least / max(self.turns))
            # What several replicas have in common is little: their boxes are not cut.
            halves = [] if self.several else box.halves(by_wire)
            for half in halves:
                heapq.heappush(open_boxes, (-reach, next(number), half))
            if not halves:
                # Where a ring must hide, what uses the wire is told apart: depths would be too many boxes.
                depths = ANY_DEPTH if by_wire else self._depths(box, least, reach)
                reach = reach if depths is ANY_DEPTH else self.reach(least, box, depths)
                least = self._least_of(box, depths, low, least, reach) if reach >= 1 else least
        return least

    def _least_of(self, box: Box, depths: Sequence[_Depth], low: float, high: float, reach: float) -> float:
        """The same of a box that is not cut, and can do `reach` times all tokens in the time given."""
        # What can be done grows with the time nearly as a straight line: secants find the time, aimed a
        # little too short; halving where they do not.
        last, guess, halve = (high, reach), high / reach, False
        while high - low > _PRECISION * high:
            aim, wide = guess * (1 - _PRECISION / 2), high - low
            middle = aim if low < aim < high and not halve else (low + high) / 2
            reach = self.reach(middle, box, depths)
            low, high = (low, middle) if reach >= 1 else (middle, high)
            if 1 - _PRECISION < reach < 1:
                break
            slope = (last[1] - reach) / (last[0] - middle)
            guess = middle + (1 - reach) / slope if slope > 0 else (low + high) / 2
            last, halve = (middle, reach), high - low > wide / 2
        return low

    def _depths(self, box: Box, seconds: float, free: float) -> Sequence[_Depth]:
        """All of them, where units could do less if all groups saw as many keys as they do on average."""
        if self.reach(seconds, box, [(0.0, 0.5)]) >= (1 - _MATTERS) * free:
            return ANY_DEPTH
        return [(place / self.depths, (place + 1) / self.depths) for place in range(self.depths)]

    def reach(self, seconds: float, box: Box, depths: Sequence[_Depth] = ANY_DEPTH) -> float:
        """What units can do at most in all micro-batches, as a part of what there is to do.

        Args:
            seconds: of all micro-batches.
            box: what plans are looked at.
            depths: where a group may be among the nested ones, as intervals that cover [0, 1].
        """
        offers = [self._offers(site, seconds, box, depths) for site in self.sites]
        parts: Sequence[float] = (1.0,)
        if not all((held == done).all() for _, held, done, _ in offers):
            # Where memory is full, holding tokens may be worth more than by time: up to what it takes memory.
            high, scarce = self.prices[-1], min(site.pieces.held_share for site in self.sites)
            parts = [*self.prices, *(high + place * (scarce - high) for place in _SCARCE if scarce > high)]
            offers = [self._offers(site, seconds, box, depths, holding=True) for site in self.sites]
        most, part = min((price(offers, box.groups, depths, part, 0.0), part) for part in parts)
        if len(depths) > 1:
            tilted = partial(price, offers, box.groups, depths, part)
            most = min(most, least(tilted, 0.0, _STEEPEST))
        return most / self.tokens * (1 + _ROUNDING)

    def _offers(
        self, site: Site, seconds: float, box: Box, depths: Sequence[_Depth], holding: bool = False
    ) -> _Offer:
        """What units of a site can do; with `holding`, also with more held in place of attention."""
        layers, stages, groups = self.job.stage_layers, self.job.pipeline_parallel, box.groups[0]
        held: list[list[Floats]] = []
        attended: list[list[Floats]] = []
        for _, deepest in depths:
            ways = [
                (count * tokens, count * done)
                for count in self.turns
                for tokens, done in self._ways(
                    site,
                    self.ring.limits(seconds, count, box.wires, stages).per_layer(layers),
                    (groups, deepest),
                    holding,
                )
            ]
            if self.more_turns:
                best = np.full(len(site.pieces.share), seconds * site.tokens_per_s)
                ways += [(best, best)] + [hold_more(best, best, site.most, np.inf)] * holding
            held.append([tokens for tokens, _ in ways])
            attended.append([done for _, done in ways])
        more = 1 + site.extra
        return site.units, more * np.array(held), more * np.array(attended), site.pieces.share

    def _ways(
        self, site: Site, limits: Limits, group: tuple[int, float], holding: bool
    ) -> Iterator[tuple[Floats, Floats]]:
        """The same for one of the micro-batches.

        Args:
            site: the units.
            limits: of a layer.
            group: how many there are at least, and how deep the units' own is at most.
            holding: as of `_offers`.
        """
        held, attended = site.pieces.most(limits, *group, self.several)
        yield held, attended
        if holding:
            yield site.pieces.holding(limits, group[0], held, attended, site.most)


def price(
    offers: Sequence[_Offer], groups: Span, depths: Sequence[_Depth], part: float, tilt: float
) -> float:
    """An upper bound of what units can do, for any prices.

    Args:
        offers: of each kind of site: units, tokens held and attended by depth, way to do it and piece, shares
            of a group.
        groups: the fewest and the most.
        depths: as of `Demand.reach`.
        part: of a token's price for holding it; the rest is for its attention.
        tilt: what a group's depth costs. Weighted by tokens, depths are 1/2 on average: it cancels out.
    """
    factor = np.array([1 - tilt * (shallowest - 0.5) for shallowest, _ in depths])[:, None, None]
    worth = [((part * held + (1 - part) * done) * factor).max(axis=(0, 1)) for _, held, done, _ in offers]
    highest = max(float((best / share).max()) for best, (*_, share) in zip(worth, offers, strict=True))
    # All kinds of sites in one array: pieces that there are not are worth nothing.
    units = np.array([count for count, *_ in offers], dtype=float)
    best, share = (np.zeros((len(offers), max(map(len, worth)))) for _ in range(2))
    for number, (most, (*_, shares)) in enumerate(zip(worth, offers, strict=True)):
        best[number, : len(most)], share[number, : len(most)] = most, shares

    def dual(price: float) -> float:
        """The bound for one price of a group."""
        taken = units @ np.maximum(0.0, (best - price * share).max(axis=1))
        return float(taken) + max(price * groups[0], price * groups[1])

    return least(dual, -highest, highest)


def least(function: Callable[[float], float], low: float, high: float) -> float:
    """The least value of a convex function that golden sections come by: any value of a dual is a bound."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    least = min(function(0.0), at_left, at_right)
    for _ in range(_SECTIONS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
        least = min(least, at_left, at_right)
    return least
