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

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.parts import BUSY_ROWS, MOST_PARTS
from megatron_hexi.planner.demand import Span
from megatron_hexi.planner.load import Load
from megatron_hexi.planner.room import Room

#: Units of a group on each of its sites: (class of site, units).
Shape = tuple[tuple[int, int], ...]

#: X, as multiples of the least that holds the group's tokens.
_WAITS = (1.0, 1.01, 1.025, 1.05, 1.1, 1.2, 1.5, 2.5)
#: Numbers of tokens and times for which the work is looked up, from the longest down by this factor. Between
#: two of them nothing is assumed but that more tokens take longer.
_TOKENS, _TIMES, _SHORTEST = 12_000, 6_000, 1e-4


@dataclass(frozen=True, eq=False)
class SiteClass:
    """Sites that are alike.

    Args:
        size: units of each.
        count: how many there are.
        loads: of a unit on each pipeline stage.
        rooms: likewise.
    """

    size: int
    count: int
    loads: Sequence[Load]
    rooms: Sequence[Room]


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
        self._job, self._classes, self._groups = job, classes, groups[0]
        #: Whether there are two groups, so that all keys travel in one step.
        self._pair = groups == (2, 2)
        self._length, self._heads = float(job.seq_length), job.workload().local_heads
        stages = job.pipeline_parallel
        # All micro-batches pass the slowest stage, and one of them the others: the last stage is taken.
        weights = np.ones(stages)
        weights[-1] += micro_batches - 1
        self._weights = weights / weights.sum()
        self._times = np.append(longest_s * np.geomspace(_SHORTEST, 1, _TIMES), np.inf)
        # Twice the sequence, so that all of it is between two of them.
        self._sizes = np.geomspace(1, 2 * self._length, _TOKENS)
        #: Tokens that a unit of each class holds at most in each of `_times`.
        self._held = [self._tokens_in_time(site) for site in classes]
        self._attended = [self._most_attended(site, longest_s) for site in classes]
        self._token_rates = np.array([self._best_rate(site, self._token_seconds) for site in classes])
        self._attention_rates = np.array([self._best_rate(site, self._head_seconds) for site in classes])
        self._parts = np.arange(1, self._heads + 1) / self._heads

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

    def _in_all(self, shape: Shape, busy: Sequence[Floats], low: Floats, high: Floats) -> Floats:
        """X + A + Y at their least together, [J].

        Args:
            shape: the group's units.
            busy: Y of each site by its heads, [H, J].
            low: tokens of the group, at least, [J].
            high: at most.
        """
        total = sum(units * self._held[place] for place, units in shape)
        least_x = np.append(0.0, self._times)[np.searchsorted(total, low)]

        def rest(until: Floats) -> Floats:
            """A + Y if X is no longer."""
            place_of = np.searchsorted(self._times, until)
            held = [units * self._held[place][place_of] for place, units in shape]
            return self._dealt(shape, self._with_all_to_alls(shape, busy, held, low), held, low, high)

        least = rest(np.full(len(low), np.inf))
        best = _WAITS[-1] * least_x + least
        for wait, following in itertools.pairwise(_WAITS):
            found = rest(following * least_x)
            best = np.minimum(best, wait * least_x + found)
            if (found <= least).all():  # a longer X only takes longer
                break
        return best

    def by_rates(self, used: Floats, seconds: float) -> Floats:
        """Tokens at most of groups with so many units of each class: by their best rates, and all memory.

        Args:
            used: units, [groups, classes].
            seconds: of a layer.
        """
        token, attention = used @ self._token_rates, used @ self._attention_rates
        most: Floats = seconds / (1 / token + self._heads / attention)
        for stage in range(len(self._weights)):
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
        for stage in range(len(self._weights)):
            rooms = [self._classes[place].rooms[stage] for place, _ in shape]
            # Tokens that one head takes the room of.
            each = low / self._heads * rooms[0].each_attended(self._groups) / rooms[0].each_held
            full = [units * room.held_alone() for (_, units), room in zip(shape, rooms, strict=True)]
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
        parts, together, costs = self._parts[:, None], sum(held), []
        for (place, units), seconds, most in zip(shape, busy, held, strict=True):
            none = np.zeros(len(tokens))
            if len(shape) > 1:
                each, latency = self._moving(place, units, outside=True)
                least = np.maximum(0.0, tokens - (together - most))
                missing = parts * np.maximum(0.0, tokens - most)
                moved = np.maximum(np.maximum(parts * (1 - parts) * tokens, missing), (1 - parts) * least)
                seconds = seconds + each * moved + np.where(parts < 1, latency, 0.0)
                none = each * least
            cost = np.concatenate([none[None], seconds])
            costs.append(np.minimum.accumulate(cost[::-1], axis=0)[::-1])
        return costs

    def _busy(self, shape: Shape, low: Floats, high: Floats, depth: float) -> list[Floats]:
        """Y of each site by its heads, [H, J]; of a group on one site with the all-to-alls inside it."""
        heads = np.arange(1.0, self._heads + 1)[:, None]
        if len(shape) > 1:
            return [
                self._attention(place, units, heads, np.ceil(heads / units), self._heads, (low, high), depth)
                for place, units in shape
            ]
        [(place, units)] = shape
        busiest: Floats = np.arange(np.ceil(self._heads / units), self._heads + 1.0)[:, None]
        every = np.full(busiest.shape, float(self._heads))
        seconds = self._attention(place, units, every, busiest, busiest, (low, high), depth)
        if units > 1:
            each, latency = self._moving(place, units, outside=False)
            part = busiest / self._heads
            seconds = seconds + each * part * (1 - part) * low + latency
        return [np.broadcast_to(seconds.min(axis=0), (self._heads, len(low)))]

    def _attention(
        self,
        place: int,
        units: int,
        heads: Floats,
        busiest: Floats,
        most_heads: Floats | int,
        tokens: tuple[Floats, Floats],
        depth: float,
    ) -> Floats:
        """Attention or exchange on a site, all passes, [heads, J].

        Args:
            place: the class of the site.
            units: of the group on it.
            heads: of these together, a column.
            busiest: of the one with most, a column.
            most_heads: of any member of the group, at most.
            tokens: of the group, at least and at most, [J].
            depth: as of `Pieces.most`.
        """
        site, (low, high) = self._classes[place], tokens
        whole = np.zeros((len(heads), len(low)))
        for weight, load in zip(self._weights, site.loads, strict=True):
            ends = [load.head_times(end, self._groups) for end in tokens]
            own, far = (
                [busiest * np.minimum(a, b) for a, b in zip(*both, strict=True)]
                for both in zip(*ends, strict=True)
            )
            forward, backward = own[0] + far[0], own[1] + far[1]
            if self._groups > 1:
                seen = load.keys_seen(high, depth)
                beside = np.minimum((site.size - units) * self._attended[place], self._length - low)
                wire = self._wire(load, units, heads / self._heads, seen, beside)
                forward, backward = np.maximum(forward, wire), np.maximum(backward, 2 * wire)
            if self._pair:
                # There is one step: its last part is computed when all keys are there, and the gradients of
                # its keys go home after that. Of units with links of their own, that is so on average.
                parts = np.clip(high * most_heads // BUSY_ROWS, 1, MOST_PARTS)
                each = 1.0 if load.links.shared else heads / units
                last = np.maximum(0.0, (each - parts + 1) / parts) / busiest
                forward = np.maximum(forward, wire + last * far[0])
                backward = np.maximum(backward, wire * (1 + (parts == 1)) + last * far[1])
            whole += weight * (load.again * forward + backward)
        return whole

    def _wire(self, load: Load, units: int, part: Floats, seen: Floats, beside: Floats) -> Floats:
        """One way of the exchange.

        Args:
            load: of the units.
            units: of a site, all of its units that share its links.
            part: of all heads, whose keys are needed.
            seen: tokens of other groups whose keys are needed.
            beside: tokens of them whose keys, of all heads, are on the site at most.
        """
        links, size = load.links, 2 * load.all_kv * load.element
        wire: Floats = part * seen * size / units / (links.inside + links.outside)
        if links.outside:
            lanes = 1 / self._job.tensor_parallel if links.shared else units
            wire = np.maximum(wire, np.maximum(0.0, part * seen - beside) * size / (links.outside * lanes))
        return wire

    def _moving(self, place: int, units: int, outside: bool) -> tuple[float, float]:
        """Seconds a token that is sent or received by a site (by a unit, if not `outside`), and latency."""
        each = latency = 0.0
        for weight, load in zip(self._weights, self._classes[place].loads, strict=True):
            links = load.links
            lanes = (1 / self._job.tensor_parallel if links.shared else units) if outside else 1
            bandwidth = links.outside if outside else links.inside
            each += weight * load.token_bytes / (bandwidth * lanes)
            latency += weight * 2 * (load.again + 1) * (links.outside_s if outside else links.inside_s)
        return each, latency

    def _tokens_in_time(self, site: SiteClass) -> Floats:
        seconds = np.minimum.accumulate(self._token_seconds(site)[::-1])[::-1]
        held: Floats = np.append(self._sizes, np.inf)[np.searchsorted(seconds, self._times, side="right")]
        return np.minimum(held, self._sizes[-1])

    def _most_attended(self, site: SiteClass, longest_s: float) -> float:
        """Tokens whose keys a unit can have at most: it attends to them, with all heads of their KV heads."""
        rate = self._best_rate(site, self._head_seconds)
        return float(min(longest_s * rate / self._heads * site.loads[0].ratio, self._length))

    def _best_rate(self, site: SiteClass, seconds: Callable[[SiteClass], Floats]) -> float:
        """Tokens a second at the best size."""
        # More tokens than one size and fewer than the next take as long as that size at least.
        return float((self._sizes[1:] / np.maximum(seconds(site)[:-1], 1e-300)).max())

    def _token_seconds(self, site: SiteClass) -> Floats:
        """Token work of a unit by `_sizes`."""
        each = zip(self._weights, site.loads, strict=True)
        seconds: Floats = sum(weight * load.token_seconds(self._sizes) for weight, load in each)
        return seconds

    def _head_seconds(self, site: SiteClass) -> Floats:
        """Attention with one head in groups of `_sizes` tokens."""
        seconds = np.zeros(len(self._sizes))
        for weight, load in zip(self._weights, site.loads, strict=True):
            for times in load.head_times(self._sizes, self._groups):
                seconds += weight * (load.again * times.forward + times.backward)
        return seconds
