"""How many tokens groups hold at most beside each other: part of the lower bound (packing.py).

A group that holds t of S tokens gets the keys of the S - t others, and sends its own to all other groups.
Both wait until it is done with its own tokens. What arrives comes over links that differ: the least time is
that of filling the other groups by the fastest link first, as far as they hold. So each group's tokens are
bounded by what the others hold at most and at least, and in turn. Most ways to pack groups are ruled out by
that already, much faster than by a linear program (together.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.groups.site_times import Shape
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.setting import Setting, Units

#: How often bounds are looked at again, as long as one of them moves by this part of the sequence.
_ROUNDS, _NARROWER = 4, 0.002
#: What rounding may take away.
_ROUNDING = 1e-6


class Beside:
    """Groups of some shapes, in the settings' longest time.

    Args:
        settings: what groups have in common, on pipeline stages that differ.
        shapes: all of them.
        most: tokens that each holds at most, [shapes].
        groups: how many there are at least.
    """

    def __init__(
        self, settings: Sequence[Setting], shapes: Sequence[Shape], most: Floats, groups: int
    ) -> None:
        [setting, *_] = self._stages = settings
        self._all, self._shapes, self._most, self._groups = setting, shapes, most, groups
        self._seconds: dict[int, tuple[Floats, Floats]] = {}
        self._keys: dict[tuple[int, int], tuple[float, float]] = {}
        #: How often keys travel in all passes: gradients of keys go home in the backward pass.
        self._times = sum(one.times * (1 + one.way) for one in setting.passes)

    def most(self, packed: Sequence[int]) -> Floats | None:
        """Tokens that groups of such shapes, by their numbers, hold at most; ``None``: not the sequence."""
        length, groups = self._all.length, range(len(packed))
        most = [float(self._most[shape]) for shape in packed]
        least = [0.0] * len(packed)
        # Of the groups beside each, by the time that their keys take: the fastest first.
        order = [
            sorted((self._between(packed[group], packed[of])[0], of) for of in groups if of != group)
            for group in groups
        ]
        sends = [
            sum(self._between(packed[user], packed[group])[1] for user in groups if user != group)
            for group in groups
        ]
        for _ in range(_ROUNDS):
            moved = 0.0
            for group in groups:
                low = max(least[group], length - (sum(most) - most[group]))
                high = min(most[group], length - (sum(least) - least[group]))
                tokens, seconds = self._alone(packed[group])
                ends = np.maximum(tokens[1:], low)
                arriving = self._arriving(order[group], least, most, length - ends)
                keys = np.maximum(arriving, sends[group] * np.maximum(tokens[:-1], low))
                may = seconds + self._times * keys <= self._all.average_s * (1 + _ROUNDING)
                may &= (tokens[1:] >= low * (1 - _ROUNDING)) & (tokens[:-1] <= high * (1 + _ROUNDING))
                if not may.any():
                    return None
                low, high = max(low, float(tokens[:-1][may][0])), min(high, float(tokens[1:][may][-1]))
                moved = max(moved, low - least[group], most[group] - high)
                least[group], most[group] = low, high
            if sum(most) < length * (1 - _ROUNDING) or sum(least) > length * (1 + _ROUNDING):
                return None
            if moved < _NARROWER * length:
                break
        return np.array(most)

    def _alone(self, shape: int) -> tuple[Floats, Floats]:
        """Ends of pieces of a group's tokens, and what it takes at least besides attention and exchange."""
        if shape not in self._seconds:
            units, heads = self._shapes[shape], (0, self._all.heads)
            most = float(self._most[shape])
            stages = [
                GroupLines(stage, units, 0.0, most, self._groups, (heads,) * len(units))
                for stage in self._stages
            ]
            layers = sum(
                stage.weight * lines.without_attention()
                for stage, lines in zip(self._stages, stages, strict=True)
            )
            self._seconds[shape] = stages[0].grid, layers + stages[0].until_done(2)
        return self._seconds[shape]

    @staticmethod
    def _arriving(
        order: Sequence[tuple[float, int]], least: Sequence[float], most: Sequence[float], tokens: Floats
    ) -> Floats:
        """Seconds at least in which keys of so many tokens of other groups arrive.

        Args:
            order: seconds a token, and the group, ascending.
            least: tokens of each group.
            most: likewise.
            tokens: of all others together.
        """
        places = [sum(least[of] for _, of in order)]
        seconds = [sum(each * least[of] for each, of in order)]
        for each, of in order:
            places.append(places[-1] + most[of] - least[of])
            seconds.append(seconds[-1] + each * (most[of] - least[of]))
        # More than the others hold is ruled out elsewhere.
        return np.interp(tokens, places, seconds)

    def _between(self, by: int, of: int) -> tuple[float, float]:
        """Seconds a token at least for a group to get keys of another one, and for that one to send them."""
        if (by, of) not in self._keys:
            stages = [
                (stage.weight, self._find_between(stage, self._shapes[by], self._shapes[of]))
                for stage in self._stages
            ]
            gets, sends = (sum(weight * both[way] for weight, both in stages) for way in (0, 1))
            self._keys[by, of] = gets, sends
        return self._keys[by, of]

    @staticmethod
    def _find_between(stage: Setting, group: Shape, other: Shape) -> tuple[float, float]:
        size = stage.key_bytes * (0.5 if stage.causal else 1.0)
        # Sites of a group share the heads: all are done at once at best.
        lanes = 0.0
        for here in group:
            if len(other) == 1:
                lanes += stage.bandwidth(here, other[0])
            else:  # heads may be on the same site
                lanes += inf if _meet(stage, here, other) else stage.lanes(*here)
        sends = 0.0
        if len(other) == 1 and stage.ratio == 1:
            if len(group) == 1:
                sends = size / stage.bandwidth(group[0], other[0])
            elif not _meet(stage, other[0], group):
                sends = size / stage.lanes(*other[0])
        return size / lanes, sends


def _meet(stage: Setting, units: Units, group: Shape) -> bool:
    """Whether units may be on a site with some of another group."""
    return any(stage.may_meet(units, others) for others in group)
