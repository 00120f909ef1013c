"""The least time that a whole group takes, whatever its members hold: part of the lower bound (packing.py).

Members of a group wait for each other at both all-to-alls of a layer, so the layer takes it

    X, until the last member is done with its tokens: members hold what they do in X, at most;
  + A, its all-to-alls: a site with a part f of the heads that holds T of the group's G tokens sends T (1 - f)
    and receives (G - T) f of all queries, keys and values: the larger is no less than f (1 - f) G;
  + Y, until the last member is done with attention and exchange: with whole heads.

Both A and Y of a site follow from its heads, given how many tokens it can hold. So for each X, the least
A + Y is that at which heads add up: sites are given what heads they can take in that time. X is tried in
intervals. Heads and tokens share a member's memory: where both do not fit, heads go where memory is left
first, and each head further takes the room of as many tokens wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.planner.demand import Span
from megatron_hexi.planner.site_times import SiteClass, SiteTimes

#: Units of a group on each of its sites: (class of site, units).
Shape = tuple[tuple[int, int], ...]

#: X, as multiples of the least that holds the group's tokens: where intervals begin. The best interval is cut
#: in two so often at most, and until it is narrow; the last one has no end, and is cut at a multiple.
_WAITS = (1.0, 1.01, 1.05, 1.2, 1.5, 2.5)
_REFINED, _NARROW, _LAST = 12, 0.005, 2.0
#: Times in which tokens are looked up, and the shortest of them as a part of the longest.
_TIMES, _SHORTEST = 6_000, 1e-4


class GroupTimes:
    """Seconds of a layer of groups, summed over pipeline stages by weight.

    Args:
        job: the job.
        classes: of sites.
        micro_batches: of the groups' replica.
        groups: of the replica, the fewest and the most.
        longest_s: of a layer; what takes longer is of no interest.
    """

    def __init__(
        self, job: Job, classes: Sequence[SiteClass], micro_batches: int, groups: Span, longest_s: float
    ) -> None:
        self._classes, self._groups, self._heads = classes, groups[0], job.workload().local_heads
        # All micro-batches pass the slowest stage, and one of them the others: the last stage is taken.
        weights = np.ones(job.pipeline_parallel)
        weights[-1] += micro_batches - 1
        self._times = np.append(longest_s * np.geomspace(_SHORTEST, 1, _TIMES), np.inf)
        self._sites = [SiteTimes(job, site, weights / weights.sum(), groups, self._times) for site in classes]
        self._token_rates = np.array([site.token_rate for site in self._sites])
        self._head_rates = np.array([site.head_rate for site in self._sites])

    def least(self, shape: Shape, tokens: Floats, depths: Sequence[float]) -> Floats:
        """Seconds that groups with tokens[j] to tokens[j + 1] tokens need at least, [depths, J = tokens - 1].

        Args:
            shape: the group's units.
            tokens: ascending; a single number: of groups with as many.
            depths: as of `Pieces.most`, ascending.
        """
        low, high = (tokens[:-1], tokens[1:]) if len(tokens) > 1 else (tokens, tokens)
        busy = [self._busy(shape, low, high, depth) for depth in (depths[0], depths[-1])]
        if all((one == other).all() for one, other in zip(*busy, strict=True)):
            # No keys are waited for, whatever the depth.
            return np.tile(self._in_all(shape, busy[0], low, high), (len(depths), 1))
        between = [self._busy(shape, low, high, depth) for depth in depths[1:-1]]
        # All depths at once: side by side.
        whole = [np.concatenate(parts, axis=1) for parts in zip(busy[0], *between, busy[1], strict=True)]
        many = len(depths)
        return self._in_all(shape, whole, np.tile(low, many), np.tile(high, many)).reshape(many, -1)

    def _busy(self, shape: Shape, low: Floats, high: Floats, depth: float) -> list[Floats]:
        """Y of each site by its heads, [H, J]; of a group on one site with the all-to-alls inside it."""
        if len(shape) > 1:
            return [self._sites[place].busy(units, low, high, depth) for place, units in shape]
        [(place, units)] = shape
        seconds = self._sites[place].busy_alone(units, low, high, depth)
        return [np.broadcast_to(seconds, (self._heads, len(low)))]

    def _in_all(self, shape: Shape, busy: Sequence[Floats], low: Floats, high: Floats) -> Floats:
        """X + A + Y at their least together, [J].

        Args:
            shape: the group's units.
            busy: Y of each site by its heads, [H, J].
            low: tokens of the group, at least, [J].
            high: at most.
        """
        total = sum(units * self._sites[place].held for place, units in shape)
        least_x = np.append(0.0, self._times)[np.searchsorted(total, low)]

        def rest(until: Floats) -> Floats:
            """A + Y if X is no longer."""
            place_of = np.searchsorted(self._times, until)
            held = [units * self._sites[place].held[place_of] for place, units in shape]
            return self._dealt(shape, self._with_all_to_alls(shape, busy, held, low), held, low, high)

        # X is in one of these intervals; A + Y is what it is at the longer end at least.
        ends = np.array([*(wait * least_x for wait in _WAITS), np.full(len(low), np.inf)])
        rests = np.array([rest(until) for until in ends])
        for _ in range(_REFINED):
            best = (ends[:-1] + rests[1:]).argmin(axis=0)[None]
            short, long = np.take_along_axis(ends, best, axis=0), np.take_along_axis(ends, best + 1, axis=0)
            middle = np.where(np.isinf(long), _LAST * short, (short + long) / 2)
            if (long - short <= _NARROW * short).all():
                break
            ends, rests = np.concatenate([ends, middle]), np.concatenate([rests, rest(middle[0])[None]])
            order = ends.argsort(axis=0, kind="stable")
            ends, rests = np.take_along_axis(ends, order, axis=0), np.take_along_axis(rests, order, axis=0)
        least: Floats = (ends[:-1] + rests[1:]).min(axis=0)
        return least

    def by_rates(self, used: Floats, seconds: float) -> Floats:
        """Tokens at most of groups with so many units of each class: by their best rates, and all memory.

        Args:
            used: units, [groups, classes].
            seconds: of a layer.
        """
        token, attention = used @ self._token_rates, used @ self._head_rates
        most: Floats = seconds / (1 / token + self._heads / attention)
        for stage in range(len(self._classes[0].rooms)):
            rooms = [site.rooms[stage] for site in self._classes]
            each = rooms[0].each_held + rooms[0].each_attended(self._groups)
            most = np.minimum(most, used @ np.array([room.left for room in rooms]) / each)
        return most

    def _dealt(
        self, shape: Shape, costs: Sequence[Floats], held: Sequence[Floats], low: Floats, high: Floats
    ) -> Floats:
        """The least A + Y in which all heads can be dealt; infinite where memory is too small.

        Args:
            shape: the group's units.
            costs: of each site, seconds with so many heads or more, [H + 1, J].
            held: of each site, tokens at most, [J].
            low: tokens of the group, at least, [J].
            high: at most.
        """
        heads = np.concatenate([cost[1:] for cost in costs])
        found = np.partition(heads, self._heads - 1, axis=0)[self._heads - 1]
        for cost in costs:  # a site without heads, too, must send off what the others cannot hold
            found = np.maximum(found, cost[0])
        for full, each in self._rooms(shape, low):
            wanted = [np.minimum(tokens, high) for tokens in held]
            spare = sum(np.minimum(want, most) for want, most in zip(wanted, full, strict=True)) - low
            free = [
                np.ceil(np.maximum(0.0, most - want) / each) for want, most in zip(wanted, full, strict=True)
            ]
            # Heads that must go where they take no token's room.
            needed = np.clip(np.ceil(self._heads - spare / each - 1e-9), 0, self._heads)
            if (np.minimum.reduce(free) >= self._heads).all() and (spare >= 0).all():
                continue
            numbers = np.arange(1, self._heads + 1)[:, None]
            without = [
                np.where(numbers <= most, cost[1:], np.inf) for cost, most in zip(costs, free, strict=True)
            ]
            ordered = np.sort(np.concatenate(without), axis=0)
            last = np.take_along_axis(ordered, np.maximum(needed.astype(int) - 1, 0)[None], axis=0)[0]
            found = np.where(spare < 0, np.inf, np.where(needed > 0, np.maximum(found, last), found))
        return found

    def _with_all_to_alls(
        self, shape: Shape, busy: Sequence[Floats], held: Sequence[Floats], tokens: Floats
    ) -> list[Floats]:
        """Seconds of A + Y of each site with so many heads or more, [H + 1, J]."""
        heads, costs = np.arange(self._heads + 1)[:, None], []
        parts = heads / self._heads
        for number, ((place, units), seconds) in enumerate(zip(shape, busy, strict=True)):
            cost = np.concatenate([np.zeros((1, len(tokens))), seconds])
            if len(shape) > 1:
                each, latency = self._sites[place].moving(units, outside=True)
                here, elsewhere = self._capacities(shape, number, heads, held, tokens)
                leave = (1 - parts) * np.maximum(0.0, tokens - elsewhere)
                come = parts * np.maximum(0.0, tokens - here)
                moved = np.maximum(np.maximum(leave, come), parts * (1 - parts) * tokens)
                cost = cost + each * moved + np.where((parts > 0) & (parts < 1), latency, 0.0)
            costs.append(np.minimum.accumulate(cost[::-1], axis=0)[::-1])
        return costs

    def _capacities(
        self, shape: Shape, number: int, heads: Ints, held: Sequence[Floats], tokens: Floats
    ) -> tuple[Floats, Floats]:
        """Tokens at most on a site that has so many heads, and on all the shape's others, [H + 1, J]."""
        here, elsewhere = held[number], sum(held) - held[number]
        for rooms, each in self._rooms(shape, tokens):
            free = np.delete(rooms, number)
            both = [np.minimum(most, room) for most, room in zip(held, rooms, strict=True)]
            here = np.minimum(here, np.maximum(0.0, rooms[number] - heads * each))
            elsewhere = np.minimum(elsewhere, sum(both) - both[number])
            elsewhere = np.minimum(elsewhere, np.maximum(0.0, free.sum() - (self._heads - heads) * each))
        return here, elsewhere

    def _rooms(self, shape: Shape, tokens: Floats) -> Iterator[tuple[Floats, Floats]]:
        """Of each stage: tokens that the sites' memory has room for, [sites], and that a head takes, [J]."""
        for stage in range(len(self._classes[0].rooms)):
            rooms = [self._classes[place].rooms[stage] for place, _ in shape]
            each = tokens / self._heads * rooms[0].each_attended(self._groups) / rooms[0].each_held
            free = [units * room.held_alone() for (_, units), room in zip(shape, rooms, strict=True)]
            yield np.array(free), each
