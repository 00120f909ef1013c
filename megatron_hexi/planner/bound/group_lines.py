"""What a group takes in each pass of a layer, as lines in its tokens: part of the lower bound (together.py).

All is worked out between the least and the most tokens that the group may have, in pieces: between two
numbers of tokens, attention takes as long as at the one or the other, and tokens as long as at the smaller.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.parts import BUSY_ROWS
from megatron_hexi.planner.bound.setting import Line, Pass, Setting, below
from megatron_hexi.planner.bound.site_times import Shape, in_steps

#: Pieces between the least and the most tokens.
_PIECES = 16
#: The same of tokens that a site of a group on several may hold.
_SITE_PIECES = 64


#: Heads of each site of a group, the fewest and the most.
Limits = tuple[tuple[int, int], ...]


class GroupLines:
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
        self.grid = np.linspace(least, most, _PIECES + 1)
        self._begin = self.grid[:-1]
        #: Of each site, one head's attention forward and backward, [2][pieces].
        self._a_head = [[self._lower(one) for one in self._attention(place)] for place, _ in shape]

    @property
    def on_one_site(self) -> bool:
        """Whether all of it is."""
        return len(self.shape) == 1

    def line(self, values: Floats | float) -> Line:
        """A line below what is at least so much in each piece."""
        return _line(self.grid, values + np.zeros(_PIECES))

    def until_done(self, kind: int) -> Floats:
        """X: until all tokens are done, forward, backward or with the vocabulary, at least, [pieces]."""
        return self._done[kind]

    @cached_property
    def _done(self) -> list[Floats]:
        held = [sum(units * self._all.held[place][kind] for place, units in self.shape) for kind in range(3)]
        return [self._until(np.asarray(one), self._begin) for one in held]

    def begins(self, one: Pass) -> Floats:
        """X in a pass, [pieces]."""
        return self.until_done(one.way) if one.tokens else np.zeros(_PIECES)

    def posts(self, one: Pass) -> Line:
        """When keys of a group on one site may leave: after X, and what shows of the all-to-all before it."""
        return self.line(self.begins(one) + self._all.before[one.way] * self._all_to_alls.min(axis=0))

    def leaves(self, way: int) -> Floats:
        """What shows of the all-to-all of a group on one site after attention, [pieces]."""
        seconds: Floats = self._all.after[way] * self._all_to_alls.min(axis=0)
        return seconds

    def wire_inside(self) -> Line:
        """All-to-alls of a group on one site with what hides of them, latency aside: a line in its tokens."""
        return self.line(self._all.whole_ratio * self._moved_alone.min(axis=0))

    def without_attention(self) -> Floats:
        """What it takes in all passes besides attention, exchange and the vocabulary, [pieces]."""
        seconds = np.zeros(_PIECES)
        for one in self._all.passes:
            seconds = seconds + one.times * self.begins(one)
            if self.on_one_site:
                shows = self._all.before[one.way] + self._all.after[one.way]
                seconds = seconds + one.times * shows * self._all_to_alls.min(axis=0)
        return seconds

    def by_itself(self, one: Pass) -> Line:
        """X + A + Y of a group on one site (columns.py)."""
        busy = self._busiest * self._a_head[0][one.way] + self._all_to_alls
        return self.line(self.begins(one) + busy.min(axis=0))

    def attention(self, number: int, way: int) -> list[Line]:
        """Y of one of several sites, with whole heads: lines in its part of the heads."""
        _, units = self.shape[number]
        heads = self.heads[number]
        busiest = np.ceil(heads / units) * float(self._a_head[number][way].min())
        return below(heads / self._all.heads, busiest)

    def attention_beyond(self, number: int, way: int) -> Line:
        """What Y of a site grows by with the group's tokens, by its fewest heads: a line in these tokens.

        Of a product x y, x' y + x y' - x' y' is below it, where x' and y' are the least (McCormick 1976).
        """
        _, units = self.shape[number]
        a_head = self._a_head[number][way]
        return self.line(np.ceil(self.heads[number][0] / units) * (a_head - a_head.min()))

    def merging(self, number: int, way: int) -> tuple[float, float]:
        """What a site's busiest member merges: seconds for a token of the group, and for another's keys."""
        place, units = self.shape[number]
        heads = self._busiest[0, 0] if self.on_one_site else np.ceil(self.heads[number][0] / units)
        queries, keys = self._all.loads[place].a_merge(way)
        return float(heads) * queries, float(heads) * keys

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

    def site_begins(self, number: int, one: Pass) -> list[Line]:
        """X of one of several sites: lines in its tokens."""
        if not one.tokens:
            return []
        place, units = self.shape[number]
        grid = np.linspace(*self.holds(number), _SITE_PIECES + 1)
        until = self._until(units * self._all.held[place][one.way], grid[:-1])
        # It grows with the tokens: what it is at least in a piece is below it at the end of the piece.
        return below(grid[1:], until)

    def moves(self, number: int) -> float:
        """Seconds of a pass's all-to-alls for each token that crosses the border of one of several sites."""
        place, units = self.shape[number]
        return self._all.moving(place, units, outside=True)[0]

    def moved(self, number: int) -> list[Line]:
        """A of one of several sites, f (1 - f) of all tokens at least: lines in its part f of the heads."""
        part = self.heads[number] / self._all.heads
        return below(part, self.moves(number) * part * (1 - part) * self.least)

    def moved_inside(self, number: int) -> Line:
        """A of one of several sites: a line in its tokens.

        A member with h of the site's n heads, which holds T tokens, sends h T (1 - h / n) of them inside the
        site, or gets as many, at least. That is concave in h: least where h is as small as the busiest
        member's may be, or as large.
        """
        place, units = self.shape[number]
        heads = self.heads[number]
        if units == 1 or not heads[0]:
            return Line(0.0, 0.0)
        each, _ = self._all.moving(place, 1, outside=False)
        fewest = np.ceil(heads / units)
        most = np.clip(self._most_heads(number), fewest, heads)
        parts = [busiest * (1 - busiest / heads) for busiest in (fewest, most)]
        return Line(each * float(np.minimum(*parts).min()) / self._all.heads, 0.0)

    def busiest(self, way: int) -> float:
        """Y of the member of a group on several sites whose heads are enough to be cut in two, at least.

        It is on a site that may have so many heads.
        """
        enough = self._enough
        each = [
            float(site[way].min())
            for site, heads in zip(self._a_head, self.heads, strict=True)
            if heads[-1] >= enough
        ]
        return enough * min(each)

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

    def work(self, number: int, way: int, keys: float) -> Floats:
        """Attention to so many tokens of other groups, of a site with all heads, [pieces]."""
        _, units = self.shape[number]
        members = self.members if self.on_one_site else units
        compute: Floats = self._a_key[number][way] * (keys * self._all.heads / members)
        return compute

    def own_block(self, number: int) -> Floats:
        """The group's own block forward, of a site with all heads, [pieces]."""
        place, units = self.shape[number]
        own, _ = self._all.loads[place].head_times(self.grid, self._groups)
        return self._lower(own.forward) * (self._all.heads / (self.members if self.on_one_site else units))

    def part_of_any(self, number: int) -> float:
        """What the member with a site's fewest heads does at least, of what the site would with all heads."""
        _, units = self.shape[number]
        if self.on_one_site:
            fewest = self._all.heads - (units - 1) * float(self._busiest[-1, 0])
        else:
            fewest = self.heads[number][0] - (units - 1) * self._most_heads(number)
        return float(max(1.0, fewest)) / self._all.heads * (self.members if self.on_one_site else units)

    def merging_of_all(self, number: int, way: int) -> tuple[float, float]:
        """What a site with all heads merges: seconds for a token of the group, and for another's keys."""
        place, units = self.shape[number]
        queries, keys = self._all.loads[place].a_merge(way)
        heads = self._all.heads / (self.members if self.on_one_site else units)
        return heads * queries, heads * keys

    def least_work(self, number: int, way: int) -> float:
        """Attention to a token of another group at least, of a site with its fewest heads."""
        fewest = self._all.heads if self.on_one_site else float(self.heads[number][0])
        return float(self.work(number, way, 1.0).min()) * fewest / self._all.heads

    @cached_property
    def _a_key(self) -> list[list[Floats]]:
        """One head's attention to a token of another group, of each site, forward and backward, [pieces]."""
        found, others = [], np.maximum(self._all.length - self.grid, 1.0)
        for place, _ in self.shape:
            load = self._all.loads[place]
            (_, far), merges = (
                load.head_times(self.grid, self._groups),
                load.merges(self.grid, self._groups),
            )
            found.append(
                [
                    self._lower(np.maximum(0.0, one - other) / others)
                    for one, other in zip(far, merges, strict=True)
                ]
            )
        return found

    def late(self, number: int, way: int, keys: float, wire: float, steps: int) -> Floats:
        """Another group's keys and the attention to them, of a site with all heads, [pieces].

        Args:
            number: of the site.
            way: forward or backward.
            keys: tokens of the other group, at least.
            wire: seconds for their keys, one way.
            steps: in which they travel at most.
        """
        compute = self.work(number, way, keys)
        thin = np.full(_PIECES, wire)
        if way == 0:
            return in_steps(thin, compute, steps)
        home = in_steps(thin, compute, max(steps - 1, 1)) + (steps == 1) * thin
        return np.maximum(home, 2 * thin)

    def _attention(self, place: int) -> list[Floats]:
        own, far = self._all.loads[place].head_times(self.grid, self._groups)
        return [one + other for one, other in zip(own, far, strict=True)]

    @staticmethod
    def _lower(values: Floats) -> Floats:
        """The smaller at both ends of each piece."""
        return np.minimum(values[:-1], values[1:])

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

    @cached_property
    def _all_to_alls(self) -> Floats:
        """Those of a pass inside its only site, by the heads of the busiest member, [busiest, pieces]."""
        [(place, units)] = self.shape
        latency = self._all.moving(place, 1, outside=False)[1] if units > 1 else 0.0
        return self._moved_alone + latency

    @cached_property
    def _moved_alone(self) -> Floats:
        """The same without latency."""
        [(place, units)], part = self.shape, self._busiest / self._all.heads
        each = self._all.moving(place, 1, outside=False)[0] if units > 1 else 0.0
        moved: Floats = each * part * (1 - part) * self._begin
        return moved

    def _until(self, held: Floats, tokens: Floats) -> Floats:
        """The longest of the times in which fewer tokens are held than these."""
        place = np.searchsorted(held, tokens)
        found: Floats = np.where(place > 0, self._all.times[np.maximum(place, 1) - 1], 0.0)
        return found


def _line(grid: Floats, values: Floats) -> Line:
    """A line below what is at least so much between each two numbers."""
    wide = grid[-2] - grid[0]
    slope = float(values[-1] - values[0]) / wide if wide > 0 else 0.0
    ends = grid[1:] if slope > 0 else grid[:-1]
    return Line(slope, float((values - slope * ends).min()))
