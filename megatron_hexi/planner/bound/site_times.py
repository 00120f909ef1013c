"""What the units of a group on one site take at least: tokens, all-to-alls, attention and exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.parts import BUSY_ROWS, MOST_PARTS
from megatron_hexi.planner.bound.demand import Span
from megatron_hexi.planner.bound.load import Load
from megatron_hexi.planner.room import Room

#: Numbers of tokens for which the work is looked up. Between two of them nothing is assumed but that more
#: tokens take longer.
_SIZES = 12_000


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


class SiteTimes:
    """Seconds of all passes of a layer, summed over pipeline stages by weight.

    Args:
        job: the job.
        site: the class of the site.
        weights: of each stage.
        groups: of the replica, the fewest and the most.
        times: what of `held` is wanted, ascending; the longest but one is of interest, the last is infinite.
    """

    def __init__(self, job: Job, site: SiteClass, weights: Floats, groups: Span, times: Floats) -> None:
        self._job, self._site, self._groups = job, site, groups[0]
        #: Whether there are two groups, so that all keys travel in one step.
        self._pair = groups == (2, 2)
        self._length, self._heads = float(job.seq_length), job.workload().local_heads
        self._stages = list(zip(weights, site.loads, strict=True))
        # Twice the sequence, so that all of it is between two of them.
        sizes = np.geomspace(1, 2 * self._length, _SIZES)
        token, head = np.zeros(_SIZES), np.zeros(_SIZES)
        for weight, load in self._stages:
            token += weight * load.token_seconds(sizes)
            for part in load.head_times(sizes, self._groups):
                head += weight * (load.again * part.forward + part.backward)
        token = np.minimum.accumulate(token[::-1])[::-1]
        #: Tokens that a unit holds at most in each of `times`.
        self.held = np.append(sizes, sizes[-1])[np.searchsorted(token, times, side="right")]
        #: Tokens a second, and tokens x heads, at the best size: more than one size takes as long as that.
        self.token_rate, self.head_rate = (
            float((sizes[1:] / np.maximum(seconds[:-1], 1e-300)).max()) for seconds in (token, head)
        )
        # A unit has keys of what it attends to, with all heads of their KV heads.
        attended = times[-2] * self.head_rate / self._heads * site.loads[0].ratio
        self._attended = min(attended, self._length)

    def busy(self, units: int, low: Floats, high: Floats, depth: float) -> Floats:
        """Attention or exchange of units of a group on several sites, by their heads, [H, J].

        Args:
            units: of the group on the site.
            low: tokens of the group, at least, [J].
            high: at most.
            depth: as of `Pieces.most`.
        """
        heads = np.arange(1.0, self._heads + 1)[:, None]
        return self._attention(units, heads, np.ceil(heads / units), self._heads, (low, high), depth)

    def busy_alone(self, units: int, low: Floats, high: Floats, depth: float) -> Floats:
        """The same of a group on one site, with the all-to-alls inside it, [J]."""
        busiest: Floats = np.arange(np.ceil(self._heads / units), self._heads + 1.0)[:, None]
        every = np.full(busiest.shape, float(self._heads))
        seconds = self._attention(units, every, busiest, busiest, (low, high), depth)
        if units > 1:
            each, latency = self.moving(1, outside=False)
            part = busiest / self._heads
            seconds = seconds + each * part * (1 - part) * low + latency
        least: Floats = seconds.min(axis=0)
        return least

    def moving(self, units: int, outside: bool) -> tuple[float, float]:
        """Seconds a token that so many units send to or receive from other sites (or units), and latency."""
        each = latency = 0.0
        for weight, load in self._stages:
            links = load.links
            lanes = (1 / self._job.tensor_parallel if links.shared else units) if outside else units
            bandwidth = links.outside if outside else links.inside
            each += weight * load.token_bytes / (bandwidth * lanes)
            latency += weight * 2 * (load.again + 1) * (links.outside_s if outside else links.inside_s)
        return each, latency

    def _attention(
        self,
        units: int,
        heads: Floats,
        busiest: Floats,
        most_heads: Floats | int,
        tokens: tuple[Floats, Floats],
        depth: float,
    ) -> Floats:
        """Attention or exchange, [heads, J].

        Args:
            units: of the group on the site.
            heads: of these together, a column.
            busiest: of the one with most, a column.
            most_heads: of any member of the group, at most.
            tokens: of the group, at least and at most, [J].
            depth: as of `Pieces.most`.
        """
        low, high = tokens
        whole = np.zeros((len(heads), len(low)))
        for weight, load in self._stages:
            ends = [load.head_times(end, self._groups) for end in tokens]
            own, far = (
                [busiest * np.minimum(a, b) for a, b in zip(*both, strict=True)]
                for both in zip(*ends, strict=True)
            )
            forward, backward = own[0] + far[0], own[1] + far[1]
            if self._groups > 1:
                # What the site's other units have keys of need not come from outside.
                beside = np.minimum((self._site.size - units) * self._attended, self._length - low)
                seen = heads / self._heads * load.keys_seen(high, depth)
                wire = load.wire_seconds(units, seen, np.maximum(0.0, seen - beside))
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
