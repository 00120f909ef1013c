"""The least time that a whole group takes, whatever its members hold: part of the lower bound (packing.py).

Members of a group wait for each other at both all-to-alls of a layer, so the layer takes it

    X, until the last member is done with its tokens: members hold what they do in X, at most;
  + A, its all-to-alls: a site with a part f of the heads that holds T of the group's G tokens sends T (1 - f)
    and receives (G - T) f of all queries, keys and values: the larger is no less than f (1 - f) G;
  + Y, until the last member is done with attention and exchange: with whole heads.

Both A and Y of a site follow from its heads, given how many tokens it can hold. So for each X, the least
A + Y is that at which heads add up: sites are given what heads they can take in that time. X is tried in
intervals. Heads and tokens share a member's memory (group_memory.py): where both do not fit, heads go where
memory is left first, and what a site must hold follows from what the others have room for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.parts import BUSY_ROWS
from megatron_hexi.planner.bound.groups.group_memory import GroupMemory, Taken
from megatron_hexi.planner.bound.groups.group_rates import seconds_a_token
from megatron_hexi.planner.bound.groups.inside import Inside, inside_of
from megatron_hexi.planner.bound.groups.least_sum import least_sum
from megatron_hexi.planner.bound.groups.site_times import Depth, Shape, SiteClass, SiteTimes, of_sites, used
from megatron_hexi.planner.bound.pieces.demand import Span

#: X, as multiples of the least that holds the group's tokens: where intervals begin.
_WAITS = (1.0, 1.1)
#: Times in which tokens are looked up, and the shortest of them as a part of the longest.
_TIMES, _SHORTEST = 6_000, 1e-4


class GroupTimes:
    """Seconds of a layer of groups, summed over pipeline stages by weight.

    Args:
        job: the job.
        classes: of sites.
        shapes: of groups.
        micro_batches: of the groups' replica.
        groups: of the replica, the fewest and the most.
        of_interest: seconds of a layer: what takes longer, or what is smaller than what may take less, is of
            no interest.
        halves: whether all-to-alls travel in two (plan/parts.py); ``None``: whatever is better.
        way: only of a forward (0) or a backward (1) pass; ``None``: of all.
    """

    def __init__(
        self,
        job: Job,
        classes: Sequence[SiteClass],
        shapes: Sequence[Shape],
        micro_batches: int,
        groups: Span,
        of_interest: tuple[float, float],
        halves: bool | None = None,
        way: int | None = None,
    ) -> None:
        workload = job.workload()
        self._halves, self._of_interest = halves, of_interest
        self._groups, self._most_groups = groups
        #: Memory of each stage on each class of sites, beside the micro-batches that a pipeline keeps.
        kept = [site.rooms[min(micro_batches, len(site.rooms)) - 1] for site in classes]
        self._rooms = list(zip(*kept, strict=True))
        self._taken = self.taken(window=1)
        self._heads, self._length = workload.local_heads, float(job.seq_length)
        self._half = 0.5 if workload.causal else 1.0
        # A KV head that two members have is sent by one of them.
        self._own_keys = workload.queries_per_kv == 1
        # All micro-batches pass the slowest stage, and one of them the others: the last stage is taken.
        weights = np.ones(job.pipeline_parallel)
        weights[-1] += micro_batches - 1
        #: What each stage is of a layer's time.
        self.weights = weights / weights.sum()
        self._times = np.append(of_interest[1] * np.geomspace(_SHORTEST, 1, _TIMES), np.inf)
        self._sites = [
            SiteTimes(job, site, self.weights, groups, halves, self._times, way) for site in classes
        ]
        #: Of a site with so many heads: their part, and what must at least move of a token, [H + 1, 1].
        self._parts = np.arange(self._heads + 1)[:, None] / self._heads
        self._mixed = self._parts * (1 - self._parts)
        self._shapes, self._used = shapes, used(shapes, len(classes))

    def taken(self, window: int) -> list[Taken]:
        """Memory that a token takes with so many steps of the exchange under way, on each pipeline stage."""
        # All classes are alike in that.
        return [Taken.of(rooms[0], self._groups, window) for rooms in self._rooms]

    def held(self, place: int) -> float:
        """Tokens that a unit of a class holds at most in the longest time of interest."""
        return float(self._sites[place].held[-2])

    def rooms(self, place: int) -> list[float]:
        """Tokens that a unit of a class has room for without heads, on each pipeline stage."""
        return [rooms[place].held_alone() for rooms in self._rooms]

    def room_of_a_head(self, low: Floats, received: Floats) -> list[Floats]:
        """Tokens that a head takes the room of, in groups of some sizes, on each pipeline stage, [J].

        Args:
            low: tokens of the group, at least, [J].
            received: tokens whose keys are there at once, at least, [J].
        """
        found = []
        for each in self._taken:
            taken = low * each.attended
            if self._groups > 1:
                taken = taken + received * each.received
                if self._own_keys:
                    taken = taken + self._half * low * each.sent
            found.append(taken / self._heads)
        return found

    def least(
        self, shape: Shape, tokens: Floats, depths: Sequence[Depth], met: float | None = None
    ) -> Floats:
        """Seconds that groups with tokens[j] to tokens[j + 1] tokens need at least, [depths, J = tokens - 1].

        Args:
            shape: the group's units.
            tokens: ascending; a single number: of groups with as many.
            depths: of the group's middle among the nested ones, at least and at most, ascending.
            met: other groups, as of `Load.head_times`.
        """
        low, high = (tokens[:-1], tokens[1:]) if len(tokens) > 1 else (tokens, tokens)
        many, first = len(depths), slice(len(low))
        busy = self._busy(shape, low, high, depths, met)
        if many > 1 and all((whole == np.tile(whole[:, first], many)).all() for whole in busy):
            # No keys are waited for, whatever the depth.
            found = self._in_all(shape, [whole[:, first] for whole in busy], low, high, 1)
            return np.tile(found, (many, 1))
        return self._in_all(shape, busy, np.tile(low, many), np.tile(high, many), many)

    def _busy(
        self, shape: Shape, low: Floats, high: Floats, depths: Sequence[Depth], met: float | None
    ) -> list[Floats]:
        """Y of each site by its heads, all depths side by side, [H, depths x J].

        Of a group on one site, with the all-to-alls inside it.
        """
        if len(shape) > 1:
            return of_sites(
                shape, lambda at: self._sites[shape[at][0]].busy(shape[at][1], low, high, depths, met)
            )
        [(place, units)] = shape
        seconds = self._sites[place].busy_alone(units, low, high, depths, met)
        return [np.broadcast_to(seconds, (self._heads, len(seconds)))]

    def _in_all(self, shape: Shape, busy: Sequence[Floats], low: Floats, high: Floats, many: int) -> Floats:
        """X + A + Y at their least together, [depths, J].

        Args:
            shape: the group's units.
            busy: Y of each site by its heads, [H, depths x J].
            low: tokens of the group, at least, [depths x J], ascending at each depth.
            high: at most.
            many: depths.
        """
        together = np.sum([units * self._sites[place].held for place, units in shape], axis=0)
        least_x = np.append(0.0, self._times)[np.searchsorted(together, low)]
        # X is in one of these intervals; A + Y is what it is at the longer end at least.
        ends = np.array([*(wait * least_x for wait in _WAITS), np.full(len(low), np.inf)])
        rest = self._rest(shape, busy, low, high)
        rests = np.array([rest(until) for until in ends])
        least: Floats = (ends[:-1] + rests[1:]).min(axis=0)
        # Smaller groups than some that may take the least time are of no interest, nor what takes too long.
        shortest_s, longest_s = self._of_interest
        may = ((ends + rests).min(axis=0) <= shortest_s).reshape(many, -1)
        larger = np.maximum.accumulate(may[:, ::-1], axis=1)[:, ::-1].ravel()
        open_ = (least <= longest_s) & ~larger
        if open_.any():
            rest = self._rest(shape, [seconds[:, open_] for seconds in busy], low[open_], high[open_])
            least[open_] = least_sum(ends[:, open_], rests[:, open_], rest)
        return least.reshape(many, -1)

    def _rest(
        self, shape: Shape, busy: Sequence[Floats], low: Floats, high: Floats
    ) -> Callable[[Floats], Floats]:
        """A + Y of groups if X is no longer than this, [J] to [J]; the arguments are those of `_in_all`."""
        memory, whole = self._memory_of(shape, low, high), self._with_latency(shape, busy)
        a_head = of_sites(shape, lambda at: self._sites[shape[at][0]].a_head(low, high))
        busiest, inside = self._busiest(a_head, high), inside_of(shape, self._sites, self._heads, a_head, low)

        def rest(until: Floats) -> Floats:
            place_of = np.searchsorted(self._times, until)
            held = of_sites(shape, lambda at: shape[at][1] * self._sites[shape[at][0]].held[place_of])
            costs = self._with_all_to_alls(shape, memory, whole, inside, held, low)
            dealt: Floats = np.maximum(memory.dealt(self._dealt(costs), costs, held), busiest)
            return dealt

        return rest

    def _busiest(self, a_head: Sequence[Floats], high: Floats) -> Floats:
        """Attention of the member with most heads, which are enough to be cut in two, [J]."""
        if not self._halves:
            return np.zeros(len(high))
        heads = np.ceil(2 * BUSY_ROWS / high)
        return np.where(heads <= self._heads, heads * np.minimum.reduce(a_head), np.inf)

    @cached_property
    def _a_token(self) -> Floats:
        """Seconds a token at least, of each shape."""
        return seconds_a_token(self._shapes, self._sites, self._heads)

    def by_rates(self, seconds: float) -> Floats:
        """Tokens at most of groups of all shapes: by units' best rates, and all their memory.

        Args:
            seconds: of a layer.
        """
        most = seconds / self._a_token
        for rooms in self._rooms:
            each = rooms[0].each_held + rooms[0].each_attended(self._groups)
            most = np.minimum(most, self._used @ np.array([room.left for room in rooms]) / each)
        return most

    def _dealt(self, costs: Sequence[Floats]) -> Floats:
        """The least A + Y in which all heads can be dealt, [J].

        Args:
            costs: of each site, seconds with so many heads or more, [H + 1, J].
        """
        heads = np.concatenate([cost[1:] for cost in costs])
        found = np.partition(heads, self._heads - 1, axis=0)[self._heads - 1]
        for cost in costs:  # a site without heads, too, must send off what the others cannot hold
            found = np.maximum(found, cost[0])
        return found

    def _with_all_to_alls(
        self,
        shape: Shape,
        memory: GroupMemory,
        costs: Sequence[Floats],
        inside: Sequence[Inside],
        held: Sequence[Floats],
        tokens: Floats,
    ) -> list[Floats]:
        """Seconds of A + Y of each site with so many heads or more, [H + 1, J].

        Args:
            shape: the group's units.
            memory: of its sites.
            costs: Y of each site and the latency of its all-to-alls, [H + 1, J].
            inside: all-to-alls inside each site.
            held: of each site, tokens at most, [J].
            tokens: of the group, at least, [J].
        """
        parts = self._parts

        def of_site(at: int) -> Floats:
            (place, units), cost = shape[at], costs[at]
            if len(shape) > 1:
                here, elsewhere = memory.capacities(at, held)
                few = np.maximum(0.0, tokens - elsewhere)
                moved = np.maximum((1 - parts) * few, parts * np.maximum(0.0, tokens - here))
                moved = np.maximum(moved, self._mixed * tokens)
                cost = cost + self._sites[place].moving(units, outside=True)[0] * moved
                cost = np.maximum(cost, inside[at].least(few))
            least: Floats = np.minimum.accumulate(cost[::-1], axis=0)[::-1]
            return least

        return of_sites(shape, of_site)

    def _with_latency(self, shape: Shape, busy: Sequence[Floats]) -> list[Floats]:
        """Y of each site with so many heads, from none, and the latency of its all-to-alls, [H + 1, J]."""

        def of_site(at: int) -> Floats:
            place, units = shape[at]
            cost = np.concatenate([np.zeros((1, busy[at].shape[1])), busy[at]])
            if len(shape) > 1:
                cost[1:-1] += self._sites[place].moving(units, outside=True)[1]
            return cost

        return of_sites(shape, of_site)

    def _memory_of(self, shape: Shape, low: Floats, high: Floats) -> GroupMemory:
        rooms = [
            [units * of_classes[place].held_alone() for place, units in shape] for of_classes in self._rooms
        ]
        # Of each other group, half of the keys at least; those of one step are there at once.
        received = self._half * (self._length - high) / max(1, self._most_groups - 1)
        return GroupMemory(rooms, self.room_of_a_head(low, received), self._heads, low, high)
