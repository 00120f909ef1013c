"""What units can do at most in a time: the relaxed plan of bound.py, priced by Lagrangian duality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.gradients import Ring
from megatron_hexi.planner.piece import Pieces

#: The bound is found to this part.
_PRECISION = 1e-3
#: What a group's depth among the nested ones may be: anything, or one of these intervals.
ANY_DEPTH = [(0.0, 1.0)]
DEPTHS = [(number / 8, (number + 1) / 8) for number in range(8)]
_TILTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
#: Depths are looked at where they change what can be done by this part.
_MATTERS = 0.003
#: Sections of the interval in which the price of a group is sought.
_SECTIONS = 18


#: The fewest and the most groups; the least and the greatest depth; what units of a kind can do.
Span = tuple[int, int]
_Depth = tuple[float, float]
_Offer = tuple[int, Floats, Floats, Floats]


@dataclass(frozen=True, eq=False)
class Site:
    """Units that are alike.

    Args:
        units: how many there are.
        pieces: what they can be.
        tokens_per_s: of each at its best.
        extra: what more than by `pieces` they may be worth, as a part (prices.py).
    """

    units: int
    pieces: Pieces
    tokens_per_s: float
    extra: float = 0.0


@dataclass(frozen=True, eq=False)
class Demand:
    """All micro-batches of an iteration on one pipeline stage.

    Args:
        job: the job.
        sites: the units.
        turns: micro-batches that a replica may take.
        ring: what each replica waits for besides.
        several: whether there are several replicas.
        prices: parts of a token's price that are for holding it; at each of them a unit that memory lets hold
            fewer tokens than it could attend to has nothing to gain by anything else.
        more_turns: whether a replica may also take more than any of `turns`.
    """

    job: Job
    sites: Sequence[Site]
    turns: Sequence[int]
    ring: Ring
    several: bool
    prices: Sequence[float]
    more_turns: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.job.seq_length * (self.job.global_batch_size // self.job.micro_batch_size)

    def least_s(
        self, spans: list[Span], depths: Sequence[_Depth], low: float, high: float
    ) -> tuple[float, list[Span]]:
        """Seconds, between two, that no plan stays below, and the numbers of groups that come closest."""
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            enough = next(
                (
                    place
                    for place, span in enumerate(spans)
                    if self.capacity(middle, span, depths) >= self.tokens
                ),
                None,
            )
            if enough is None:
                low = middle
            else:
                # Those before it are not enough now, so not in less time either. It is asked first next time.
                high, spans = middle, spans[enough:]
        return low, spans

    def depth_matters(self, span: Span, seconds: float) -> bool:
        """Whether units could do less if all groups saw as many keys as they do on average."""
        free, average = (self.capacity(seconds, span, [(0.0, depth)]) for depth in (1.0, 0.5))
        return average < (1 - _MATTERS) * free

    def capacity(self, seconds: float, groups: Span, depths: Sequence[_Depth]) -> float:
        """Tokens of an iteration that units can do at most.

        Args:
            seconds: of all micro-batches.
            groups: the fewest and the most.
            depths: where a group may be among the nested ones, as intervals that cover [0, 1].
        """
        offers = [self._offers(site, seconds, groups[0], depths) for site in self.sites]
        same = all((held == done).all() for _, held, done, _ in offers)
        prices = self.prices[:1] if same else self.prices
        tilts = (0.0,) if len(depths) == 1 else _TILTS
        return min(price(offers, groups, depths, part, tilt) for part in prices for tilt in tilts)

    def _offers(self, site: Site, seconds: float, groups: int, depths: Sequence[_Depth]) -> _Offer:
        layers = self.job.stage_layers
        held: list[Floats] = []
        attended: list[Floats] = []
        for _, deepest in depths:
            limits = [self.ring.micro_batch_s(seconds, count) / layers for count in self.turns]
            most = [site.pieces.most(limit, groups, deepest, self.several) for limit in limits]
            for which, values in enumerate((held, attended)):
                each = [count * pair[which] for count, pair in zip(self.turns, most, strict=True)]
                if self.more_turns:
                    each.append(np.full(len(each[0]), seconds * site.tokens_per_s))
                values.append(np.max(each, axis=0))
        more = 1 + site.extra
        return site.units, more * np.array(held), more * np.array(attended), site.pieces.share


def price(
    offers: Sequence[_Offer], groups: Span, depths: Sequence[_Depth], part: float, tilt: float
) -> float:
    """An upper bound of what units can do, for any prices.

    Args:
        offers: of each kind of site: units, tokens held and attended by depth and piece, shares of a group.
        groups: the fewest and the most.
        depths: as of `Demand.capacity`.
        part: of a token's price for holding it; the rest is for its attention.
        tilt: what a group's depth costs. Weighted by tokens, depths are 1/2 on average: it cancels out.
    """
    factor = np.array([1 - tilt * (shallowest - 0.5) for shallowest, _ in depths])[:, None]
    worth = [
        (units, ((part * held + (1 - part) * done) * factor).max(axis=0), share)
        for units, held, done, share in offers
    ]

    def dual(price: float) -> float:
        """The bound for one price of a group."""
        taken = sum(units * max(0.0, float((best - price * share).max())) for units, best, share in worth)
        return taken + max(price * groups[0], price * groups[1])

    highest = max(float((best / share).max()) for _, best, share in worth)
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
