"""What groups hold at most by who is outside of them, worked out where it matters: part of the lower bound.

The more groups are outside, the more queries a group merges; the more tokens these hold, the fewer keys it
sees (load.py). Forward and backward passes are told apart: each ends with its slowest group (nested.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.planner.bound.packings.worth import Way, Worth

#: How finely a group's depth among the nested ones is told apart.
DEPTHS = 16
#: Groups that one meets (`Load.head_times`), as they are told apart: at least so many.
MET = np.concatenate([np.arange(0, 32, 0.5), np.geomspace(32, 8192, 160)])
#: A shape is worked out wherever it is first; then roughly, and then closely, by who is outside of it. Bounds
#: of tokens, as parts of the most in the longest time, likewise.
_ANYWHERE, _ROUGH, _CLOSE = (
    np.concatenate([np.linspace(few, middle, 25, endpoint=False), np.linspace(middle, 1, many)])
    for few, middle, many in ((0.1, 0.5, 101), (0.5, 0.9, 81), (0.5, 0.9, 161))
)
#: Depths that are looked at; and what that costs, of each site.
_LEVELS = ((_ROUGH, 4, 3), (_CLOSE, DEPTHS, 16))
#: All passes, and forward (0) and backward (1) by themselves.
_PASSES = (None, 0, 1)

#: A shape, and a place among `MET`.
Place = tuple[int, int]


class Limits(NamedTuple):
    """Seconds of a layer: of all passes, of a forward pass and of a backward pass."""

    whole: float
    forward: float
    backward: float


class Caps(NamedTuple):
    """What groups hold at most.

    Args:
        tokens: by how many groups they meet, depths, and units of a group, [places, depths, kinds].
        shapes: of which shape, likewise.
    """

    tokens: Floats
    shapes: Ints


class NestedWorth:
    """Shapes of groups that are used in one way, and what they hold, one inside the other.

    Args:
        worth: what they hold wherever they are.
        way: how they are used.
        kinds: of each shape: its number among those that differ in units.
    """

    def __init__(self, worth: Worth, way: Way, kinds: Ints) -> None:
        self._worth, self._way, self._kinds = worth, way, kinds
        self._most_kinds = int(kinds.max()) + 1
        #: Of shapes wherever they are: bounds of tokens, and least seconds of all passes.
        self._anywhere: dict[int, tuple[Floats, Floats]] = {}
        #: Of those that meet so many groups, roughly and closely: bounds, and least seconds by depth, of each
        #: of `_PASSES`.
        self._found: dict[Place, list[tuple[Floats, list[Floats]]]] = {}

    def caps(self, most: Floats, limits: Limits, places: Sequence[int]) -> Caps:
        """Tokens at most as far as is known.

        Args:
            most: wherever groups are, [shapes].
            limits: of a layer.
            places: among `MET` that are asked for.
        """
        most = np.minimum(most, self._worth.group_times(self._way).by_rates(limits.whole))
        for shape, (bounds, seconds) in self._anywhere.items():
            most[shape] = min(most[shape], _fitting(bounds, seconds <= limits.whole)[0])
        size = len(places), DEPTHS, self._most_kinds
        tokens, shapes = np.zeros(size), np.zeros(size, dtype=np.int64)
        # Of shapes with the same units, what holds most counts: the last one, where so many are ascending.
        known = sorted({shape for shape, _ in self._found})
        order = np.argsort(most, kind="stable")
        order = order[~np.isin(order, known)]
        tokens[:, :, self._kinds[order]], shapes[:, :, self._kinds[order]] = most[order], order
        for shape in known:
            kind = self._kinds[shape]
            for number, place in enumerate(places):
                hold = np.full(DEPTHS, most[shape])
                for bounds, each in self._found.get((shape, place), ()):
                    fits = [one <= limit for one, limit in zip(each, limits, strict=True)]
                    fitting = _fitting(bounds, np.logical_and.reduce(fits))
                    hold = np.minimum(hold, np.repeat(fitting, DEPTHS // len(fitting)))
                better = hold > tokens[number, :, kind]
                tokens[number, better, kind], shapes[number, better, kind] = hold[better], shape
        return Caps(tokens, shapes)

    def work_out(self, chain: Sequence[Place], left: float) -> int:
        """Find more of the least times of groups; what that costs, 0 where no more are to be found.

        Args:
            chain: the groups.
            left: what it may cost.
        """
        groups, shapes = sorted(set(chain)), self._worth.shapes
        # The same groups in another order come next: finding them takes longer than working these out.
        mixed = sorted(itertools.product({shape for shape, _ in chain}, {met for _, met in chain}))
        todo = [(one, 1) for one in groups if one[0] not in self._anywhere]
        for level, (of_level, (_, _, each)) in enumerate(zip((mixed, groups), _LEVELS, strict=True)):
            todo = todo or [(one, each) for one in of_level if len(self._found.get(one, ())) == level]
        costs = sum(each * len(shapes[shape]) for (shape, _), each in todo)
        if costs > left:
            return 0
        for one, _ in todo:
            self._find(one)
        return costs

    def _find(self, place: Place) -> None:
        shape, met = place
        times, units = self._worth.group_times(self._way), self._worth.shapes[shape]
        if shape not in self._anywhere:
            bounds = self._worth.most(shape, self._way) * _ANYWHERE
            self._anywhere[shape] = bounds, times.least(units, bounds, [(0.0, 1.0)])
            return
        bounds, seconds = self._anywhere[shape]
        most = _fitting(bounds, seconds <= self._worth.longest_s(self._way))[0]
        found = self._found.setdefault(place, [])
        parts, many, _ = _LEVELS[len(found)]
        depths = [(0.0, (number + 1) / many) for number in range(many)]
        seconds_of = [
            self._worth.group_times(self._way, one).least(units, most * parts, depths, float(MET[met]))
            for one in _PASSES
        ]
        found.append((most * parts, seconds_of))


def _fitting(bounds: Floats, fits: Bools) -> Floats:
    """Tokens at most, from the intervals between bounds that there is time for, [depths, intervals]."""
    most: Floats = np.where(fits, bounds[1:], bounds[0]).max(axis=1)
    return most
