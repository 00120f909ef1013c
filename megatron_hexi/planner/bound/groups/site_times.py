"""What the units of a group on one site take at least: tokens, all-to-alls, attention and exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.parts import BUSY_ROWS, MOST_PARTS
from megatron_hexi.planner.bound.pieces.demand import Span
from megatron_hexi.planner.bound.pieces.load import Load
from megatron_hexi.planner.fleet.room import Room

#: Numbers of tokens for which the work is looked up. Between two of them nothing is assumed but that more
#: tokens take longer.
_SIZES = 12_000
#: More steps of the exchange hide all but nothing.
_FEW_STEPS = 12

#: Where the middle of a group is among the nested ones, from 0, outermost, to 1: at least and at most.
Depth = tuple[float, float]
#: Units of a group on each of its sites: (class of site, units).
Shape = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class SiteClass:
    """Sites that are alike.

    Args:
        sites: units of each.
        loads: of a unit on each pipeline stage.
        rooms: likewise, for each number of micro-batches, from one, that a pipeline can keep at a time.
    """

    sites: Sequence[Sequence[int]]
    loads: Sequence[Load]
    rooms: Sequence[Sequence[Room]]

    @property
    def size(self) -> int:
        """Units of each."""
        return len(self.sites[0])

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.sites)


def used(shapes: Sequence[Shape], classes: int) -> Floats:
    """Units of each class in groups of some shapes, [shapes, classes]."""
    units = np.zeros((len(shapes), classes))
    for number, shape in enumerate(shapes):
        for place, count in shape:
            units[number, place] += count
    return units


def of_sites[T](shape: Shape, of: Callable[[int], T]) -> list[T]:
    """What holds of each site of a group, by its place; found once for sites that are alike."""
    found = {shape[at]: of(at) for at in {one: at for at, one in enumerate(shape)}.values()}
    return [found[one] for one in shape]


def rising(seconds: Floats) -> Floats:
    """What so many tokens or more take at least, from what ascending numbers of them take."""
    least: Floats = np.minimum.accumulate(seconds[::-1])[::-1]
    return least


def held_in(times: Floats, sizes: Floats, seconds: Floats) -> Floats:
    """Tokens at most in each of some times, from the seconds that ascending numbers of them take."""
    held: Floats = np.append(sizes, sizes[-1])[np.searchsorted(rising(seconds), times, side="right")]
    return held


def in_steps(wire: Floats, compute: Floats, steps: int) -> Floats:
    """The least time in which keys travel and are computed with, however they are split into so many steps.

    With parts q of them in each step, no step is computed before its keys are there, and the later ones
    follow it: for all steps j at least

        wire (q_1 + ... + q_j) + compute (q_j + ... + q_k)

    which is least where all are alike: q grow by r = compute / wire from step to step. Where gradients of a
    step go home after it, an empty last step is best: that is one step fewer.
    """
    with np.errstate(over="ignore"):
        seconds: Floats = compute + wire * first_part(compute / np.maximum(wire, 1e-300), steps)
    return seconds


def first_part[T: (float, Floats)](ratio: T, steps: int) -> T:
    """What travels in the first step, where that grows by a ratio from step to step."""
    whole = ratio * 0 + 1
    for _ in range(steps - 1):
        whole = whole * ratio + 1
    return 1 / whole


class SiteTimes:
    """Seconds of all passes of a layer, summed over pipeline stages by weight.

    Args:
        job: the job.
        site: the class of the site.
        weights: of each stage.
        groups: of the replica, the fewest and the most.
        halves: whether all-to-alls travel in two, and first keys in as many parts or more; ``None``: whatever
            is better.
        times: what of `held` is wanted, ascending; the longest but one is of interest, the last is infinite.
        way: only of a forward (0) or a backward (1) pass; ``None``: of all.
    """

    def __init__(
        self,
        job: Job,
        site: SiteClass,
        weights: Floats,
        groups: Span,
        halves: bool | None,
        times: Floats,
        way: int | None = None,
    ) -> None:
        self._way = way
        self._job, self._site, self._groups, self._halves = job, site, groups[0], halves
        #: Steps of the exchange at most, the parts of the first one counted.
        self._most_steps = groups[1] - 2 + (1 if halves is False else MOST_PARTS)
        #: Whether there are two groups, so that all keys travel in one step.
        self._pair = groups == (2, 2)
        self._length, self._heads = float(job.seq_length), job.workload().local_heads
        self._stages = list(zip(weights, site.loads, strict=True))
        # Twice the sequence, so that all of it is between two of them.
        sizes = np.geomspace(1, 2 * self._length, _SIZES)
        token, head = np.zeros(_SIZES), np.zeros(_SIZES)
        for weight, load in self._stages:
            token += weight * load.token_seconds(sizes, way)
            forward, backward = load.often(way)
            for part in load.head_times(sizes, self._groups):
                head += weight * (forward * part.forward + backward * part.backward)
        token = rising(token)
        #: Tokens that a unit holds at most in each of `times`.
        self.held = held_in(times, sizes, token)
        #: Tokens a second, and tokens x heads, at the best size: more than one size takes as long as that.
        self.token_rate, self.head_rate = (
            float((sizes[1:] / np.maximum(seconds[:-1], 1e-300)).max()) for seconds in (token, head)
        )
        # What a unit attends to takes it attention, all heads together;
        a_token = self._heads / self.head_rate
        if site.loads[0].crosses:
            # and some unit of the site holds the tokens, or takes them in.
            a_token += min(1 / self.token_rate, self.moving(1, outside=True)[0])
        attended = times[-2] / a_token * site.loads[0].ratio
        #: Tokens that a unit has keys of at most: of what it attends to, with all heads of their KV heads.
        self._attended = min(attended, self._length)

    def busy(
        self, units: int, low: Floats, high: Floats, depths: Sequence[Depth], met: float | None = None
    ) -> Floats:
        """Attention or exchange of units of a group on several sites, by their heads, [H, depths x J].

        Args:
            units: of the group on the site.
            low: tokens of the group, at least, [J].
            high: at most.
            depths: of the group, side by side.
            met: other groups, as of `Load.head_times`.
        """
        heads = np.arange(1.0, self._heads + 1)[:, None]
        return self._attention(units, heads, np.ceil(heads / units), self._heads, (low, high), depths, met)

    def a_head(self, low: Floats, high: Floats) -> Floats:
        """Attention of a unit with one head, [J].

        Args:
            low: tokens of the group, at least, [J].
            high: at most.
        """
        seconds = np.zeros(len(low))
        for weight, load in self._stages:
            ends = [load.head_times(end, self._groups) for end in (low, high)]
            for way, often in enumerate(load.often(self._way)):
                seconds += (
                    weight * often * sum(np.minimum(a[way], b[way]) for a, b in zip(*ends, strict=True))
                )
        return seconds

    def busy_alone(
        self, units: int, low: Floats, high: Floats, depths: Sequence[Depth], met: float | None = None
    ) -> Floats:
        """The same of a group on one site, with the all-to-alls inside it, [depths x J]."""
        busiest: Floats = np.arange(np.ceil(self._heads / units), self._heads + 1.0)[:, None]
        every = np.full(busiest.shape, float(self._heads))
        seconds = self._attention(units, every, busiest, busiest, (low, high), depths, met)
        if units > 1:
            each, latency = self.moving(1, outside=False)
            part = busiest / self._heads
            seconds = seconds + np.tile(each * part * (1 - part) * low, len(depths)) + latency
        least: Floats = seconds.min(axis=0)
        return least

    def moving(self, units: int, outside: bool) -> tuple[float, float]:
        """Seconds a token that so many units send to or receive from other sites (or units), and latency."""
        each = latency = 0.0
        for weight, load in self._stages:
            seconds, waits = load.moving(units, outside, in_halves=self._halves is not False)
            weight *= sum(load.often(self._way)) / sum(load.often())
            each, latency = each + weight * seconds, latency + weight * waits
        return each, latency

    def _attention(
        self,
        units: int,
        heads: Floats,
        busiest: Floats,
        most_heads: Floats | int,
        tokens: tuple[Floats, Floats],
        depths: Sequence[Depth],
        met: float | None,
    ) -> Floats:
        """Attention or exchange, [heads, depths x J].

        Args:
            units: of the group on the site.
            heads: of these together, a column.
            busiest: of the one with most, a column.
            most_heads: of any member of the group, at most.
            tokens: of the group, at least and at most, [J].
            depths: of the group, side by side.
            met: other groups, as of `Load.head_times`.
        """
        low, high = (np.tile(end, len(depths)) for end in tokens)
        shallowest, deepest = (np.repeat(ends, len(tokens[0])) for ends in zip(*depths, strict=True))
        whole = np.zeros((len(heads), len(low)))
        for weight, load in self._stages:
            ends = [load.head_times(end, self._groups, deepest, met) for end in (low, high)]
            own, far = (
                [busiest * np.minimum(a, b) for a, b in zip(*both, strict=True)]
                for both in zip(*ends, strict=True)
            )
            forward, backward = own[0] + far[0], own[1] + far[1]
            if self._groups > 1:
                # What the site's other units have keys of need not come from outside.
                beside = np.minimum((self._site.size - units) * self._attended, self._length - low)
                part = heads / self._heads
                seen = part * load.keys_seen(high, deepest)
                # Of a group that is not on the site, half is seen or all.
                abroad = np.maximum(load.shown * (part * (self._length - high) - beside), seen - beside)
                abroad = np.maximum(0.0, abroad)
                wire = load.wire_seconds(units, seen, abroad)
                forward, backward = np.maximum(forward, wire), np.maximum(backward, 2 * wire)
                steps = self._most_steps
                if steps <= _FEW_STEPS and not load.links.shared:
                    # On average of the site's units, each with links of its own. Work goes with tokens of
                    # other groups, of half of which at least the keys are seen.
                    away = np.maximum(0.0, part * (self._length - high) - beside)
                    mean = away / (part * np.maximum(self._length - low, 1.0)) * heads / units / busiest
                    thin = load.wire_seconds(units, load.shown * away, load.shown * away)
                    merging = load.merges(tokens[1], self._groups, met)
                    merges = [busiest * np.tile(one, len(depths)) for one in merging]
                    work = [
                        mean * np.maximum(0.0, one - other) for one, other in zip(far, merges, strict=True)
                    ]
                    forward = np.maximum(forward, in_steps(thin, work[0], steps))
                    backward = np.maximum(
                        backward, in_steps(thin, work[1], max(steps - 1, 1)) + (steps == 1) * thin
                    )
                if units == self._site.size and load.ratio == 1 and not load.links.shared:
                    # Each other group gets half of the keys, and one outside it all of them; a step takes as
                    # long as what the unit sends, too.
                    outer = shallowest * self._length > high / 2
                    fewest = load.shown * (self._groups - 1) + (1 - load.shown) * outer
                    sent = part * low * (fewest if met is None else met)
                    sending = load.wire_seconds(units, sent, sent)
                    forward, backward = np.maximum(forward, sending), np.maximum(backward, 2 * sending)
                    wire = np.maximum(wire, sending)
            if self._pair:
                # There is one step: its last part is computed when all keys are there, and the gradients of
                # its keys go home after that. Of units with links of their own, that is so on average.
                parts = np.clip(high * most_heads // BUSY_ROWS, 1, 1 if self._halves is False else MOST_PARTS)
                each = 1.0 if load.links.shared else heads / units
                last = np.maximum(0.0, (each - parts + 1) / parts) / busiest
                forward = np.maximum(forward, wire + last * far[0])
                backward = np.maximum(backward, wire * (1 + (parts == 1)) + last * far[1])
            often = load.often(self._way)
            whole += weight * (often[0] * forward + often[1] * backward)
        return whole
