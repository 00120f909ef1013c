"""Tokens and heads that a group's sites and members may have in a time: part of the bound (together.py).

They follow from each other, and from memory. What depends on the group's tokens is worked out between the
least and the most that it may have, in pieces.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.parts import BUSY_ROWS
from megatron_hexi.planner.bound.groups.site_times import Shape
from megatron_hexi.planner.bound.waiting.setting import Pass, Setting

#: Pieces between the least and the most tokens.
PIECES = 16

#: Heads of each site of a group, the fewest and the most.
Limits = tuple[tuple[int, int], ...]


class GroupReach:
    """A group.

    Args:
        setting: what all groups have in common.
        shape: its units.
        least: tokens.
        most: likewise.
        groups: how many there are.
        limits: heads of each site, at least and at most.
    """

    def __init__(
        self, setting: Setting, shape: Shape, least: float, most: float, groups: int, limits: Limits
    ) -> None:
        self._all, self.shape, self.least, self.most, self._groups = setting, shape, least, most, groups
        self._limits = limits
        #: Ends of the pieces, in tokens, [pieces + 1].
        self.grid = np.linspace(least, most, PIECES + 1)
        self._begin = self.grid[:-1]
        #: Of each site, one head's attention forward and backward, [2][pieces].
        self._a_head = [[self._lower(one) for one in self._attention(place)] for place, _ in shape]

    @property
    def on_one_site(self) -> bool:
        """Whether all of it is."""
        return len(self.shape) == 1

    def until_done(self, kind: int) -> Floats:
        """X: until all tokens are done, forward, backward or with the vocabulary, at least, [pieces]."""
        return self._done[kind]

    @cached_property
    def _done(self) -> list[Floats]:
        held = [sum(units * self._all.held[place][kind] for place, units in self.shape) for kind in range(3)]
        return [self._until(np.asarray(one), self._begin) for one in held]

    def begins(self, one: Pass) -> Floats:
        """X in a pass, [pieces]."""
        return self.until_done(one.way) if one.tokens else np.zeros(PIECES)

    def holds(self, number: int) -> tuple[float, float]:
        """Tokens that one of several sites holds, at least and at most."""
        return max(0.0, self.least - (sum(self._most_held) - self._most_held[number])), self._most_held[
            number
        ]

    def rooms(self, number: int) -> list[float]:
        """Tokens that one of several sites has room for without heads, on each pipeline stage."""
        place, units = self.shape[number]
        return [units * room for room in self._all.alone.rooms(place)]

    @cached_property
    def _most_held(self) -> list[float]:
        """Tokens of each of several sites at most, by time, and by memory beside the fewest heads."""
        each = self._all.alone.room_of_a_head(np.array([self.least]), np.zeros(1))
        a_head, most = [float(of_stage[0]) for of_stage in each], list[float]()
        for number, ((place, units), (few, _)) in enumerate(zip(self.shape, self._limits, strict=True)):
            by_time = units * self._all.alone.held(place)
            by_memory = [room - few * each for room, each in zip(self.rooms(number), a_head, strict=True)]
            most.append(max(0.0, min(self.most, by_time, *by_memory)))
        return most

    def moves(self, number: int) -> float:
        """Seconds of a pass's all-to-alls for each token that crosses the border of one of several sites."""
        place, units = self.shape[number]
        return self._all.moving(place, units, outside=True)[0]

    @cached_property
    def heads(self) -> list[Floats]:
        """Numbers of heads that each of several sites may have in the time that there is; none: no way."""
        if self.on_one_site:
            return []
        all_, least, most = self._all.heads, list[int](), list[int]()
        begins = self.until_done(2)[0] + sum(one.times * self.begins(one)[0] for one in self._all.passes)
        for number, (_, units) in enumerate(self.shape):
            low, high = self._limits[number]
            heads = np.arange(low, high + 1.0)
            part, (_, holds) = heads / all_, self.holds(number)
            moved = self.moves(number) * part * np.maximum(self.least - holds, (1 - part) * self.least)
            seconds = begins + sum(
                one.times * (moved + np.ceil(heads / units) * self._a_head[number][one.way].min())
                for one in self._all.passes
            )
            may = heads[seconds <= self._all.longest_s]
            least.append(int(may.min(initial=all_)))
            most.append(int(may.max(initial=-1.0)))
        fewest, many = sum(least), sum(most)
        found = [
            np.arange(max(low, all_ - (many - high)), min(high, all_ - (fewest - low)) + 1.0)
            for low, high in zip(least, most, strict=True)
        ]
        may = all(len(heads) for heads in found) and max(heads[-1] for heads in found) >= self._enough
        return found if may else [np.arange(0.0)] * len(self.shape)

    @property
    def _enough(self) -> float:
        """Heads at least of the busiest member, so that they can be cut in two."""
        return float(np.ceil(self._all.rows / self.most)) if self.most > 0 else 0.0

    def _most_heads(self, number: int) -> float:
        """Heads that a member on one of several sites has at most, in the time that there is."""
        forward, backward = (float(one.min()) for one in self._a_head[number])
        seconds = self._all.loads[0].again * forward + backward
        return min(self._left // seconds, self._all.heads) if seconds > 0 else float(self._all.heads)

    @cached_property
    def parts(self) -> int:
        """In how many parts the first keys may travel: its busiest member has enough to do in each."""
        most = 0.0
        for forward, backward in self._a_head:
            each = float(self._all.loads[0].again * forward.min() + backward.min())
            most = max(most, min(self._all.heads, self._left // each) if each > 0 else self._all.heads)
        return int(np.clip(self.most * most // BUSY_ROWS, 1, self._all.most_parts))

    @cached_property
    def members(self) -> float:
        """Members with equally many heads that would be as busy as these are, on average of all heads.

        The busiest may be known to have more heads than its part: 1 / sum of (heads / all heads)^2.
        """
        units, heads = self.shape[0][1], self._all.heads
        busiest = int(self._busiest[0, 0])
        others = divmod(heads - busiest, units - 1) if units > 1 else (0, 0)
        each, more = others
        squares = busiest**2 + more * (each + 1) ** 2 + (max(units - 1, 0) - more) * each**2
        return heads**2 / squares

    def part_of_any(self, number: int) -> float:
        """What the member with a site's fewest heads does at least, of what the site would with all heads."""
        _, units = self.shape[number]
        if self.on_one_site:
            fewest = self._all.heads - (units - 1) * float(self._busiest[-1, 0])
        else:
            fewest = self.heads[number][0] - (units - 1) * self._most_heads(number)
        return float(max(1.0, fewest)) / self._all.heads * (self.members if self.on_one_site else units)

    @cached_property
    def _left(self) -> float:
        """Seconds that are left for attention."""
        tokens = sum(one.times * float(self.begins(one)[0]) for one in self._all.passes)
        return max(0.0, self._all.longest_s - tokens - float(self.until_done(2)[0]))

    @cached_property
    def _busiest(self) -> Floats:
        """Heads that the busiest member of a group on one site may have, a column."""
        [(_, units)], heads = self.shape, self._all.heads
        fewest = int(min(heads, max(np.ceil(heads / units), self._enough)))
        each = float(self._all.loads[0].again * self._a_head[0][0].min() + self._a_head[0][1].min())
        most = int(np.clip(self._left // each if each > 0 else heads, fewest, heads))
        found: Floats = np.arange(fewest, most + 1.0)[:, None]
        return found

    def _attention(self, place: int) -> list[Floats]:
        own, far = self._all.loads[place].head_times(self.grid, self._groups)
        return [one + other for one, other in zip(own, far, strict=True)]

    @staticmethod
    def _lower(values: Floats) -> Floats:
        """The smaller at both ends of each piece."""
        return np.minimum(values[:-1], values[1:])

    def _until(self, held: Floats, tokens: Floats) -> Floats:
        """The longest of the times in which fewer tokens are held than these."""
        place = np.searchsorted(held, tokens)
        found: Floats = np.where(place > 0, self._all.times[np.maximum(place, 1) - 1], 0.0)
        return found
