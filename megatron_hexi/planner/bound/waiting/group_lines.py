"""What a group takes in each pass of a layer, as lines in its tokens: part of the lower bound (together.py).

Between two numbers of tokens, attention takes as long as at the one or the other, and tokens as long as at
the smaller; which are looked at, and what sites may hold, is in group_reach.py.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.groups.site_times import in_steps
from megatron_hexi.planner.bound.waiting.group_reach import PIECES, GroupReach
from megatron_hexi.planner.bound.waiting.lines import Line, below, below_pieces
from megatron_hexi.planner.bound.waiting.setting import Pass

#: Pieces of the tokens that a site of a group on several may hold.
_SITE_PIECES = 64


class GroupLines(GroupReach):
    """A group, and what it takes; the arguments are those of `GroupReach`."""

    def line(self, values: Floats | float) -> Line:
        """A line below what is at least so much in each piece."""
        return below_pieces(self.grid, values + np.zeros(PIECES))

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
        seconds = np.zeros(PIECES)
        for one in self._all.passes:
            seconds = seconds + one.times * self.begins(one)
            if self.on_one_site:
                shows = self._all.before[one.way] + self._all.after[one.way]
                seconds = seconds + one.times * shows * self._all_to_alls.min(axis=0)
        return seconds

    def by_itself(self, one: Pass) -> Line:
        """X + A + Y of a group on one site (group_times.py)."""
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

    def site_begins(self, number: int, one: Pass) -> list[Line]:
        """X of one of several sites: lines in its tokens."""
        if not one.tokens:
            return []
        place, units = self.shape[number]
        grid = np.linspace(*self.holds(number), _SITE_PIECES + 1)
        until = self._until(units * self._all.held[place][one.way], grid[:-1])
        # It grows with the tokens: what it is at least in a piece is below it at the end of the piece.
        return below(grid[1:], until)

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
        thin = np.full(PIECES, wire)
        if way == 0:
            return in_steps(thin, compute, steps)
        home = in_steps(thin, compute, max(steps - 1, 1)) + (steps == 1) * thin
        return np.maximum(home, 2 * thin)

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
