"""The least that any plan waits for gradients, weights and the optimizer: part of the lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.compute import device_speeds, optimizer_seconds, token_times
from megatron_hexi.cost.memory import GRADIENT_BYTES, stage_params
from megatron_hexi.planner.fleet.links import Links, best_links
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet

#: Rows at which a forward pass's part of token work is taken.
_ROWS = 2.0**14
#: The same of attention: backward passes count 2.5 times as many FLOPs and run no faster.
_ATTENTION_FORWARD = 1 / 3.5

#: Part of the time of a pass in which the wire is free in any plan that is worth while.
_MOSTLY_FREE = 0.3


@dataclass(frozen=True)
class Limits:
    """What each of the micro-batches of a replica may take.

    Args:
        whole: seconds.
        turns: with the ring of gradients, so many of them,
        and_wire: and what else uses the wire while the ring should hide, take so many seconds at most;
            ``None``: there is no ring to hide.
        wire: the least and the most of what uses the wire besides, over all units; seconds.
        forward: whether the ring hides behind a forward pass too.
        count: of micro-batches.
    """

    whole: float
    turns: float = 1.0
    and_wire: float | None = None
    wire: tuple[float, float] = (0.0, inf)
    forward: bool = True
    count: int = 1

    def through(self, parts: Sequence[Floats]) -> Floats:
        """The part of the limits that all micro-batches take, from the parts that each stage's passes would.

        In a pipeline (1F1B) all pass the slowest stage, and one of them the others besides; `whole` is what
        each pass may take if all stages take the same.
        """
        if len(parts) == 1:
            return parts[0]
        passes = self.count + len(parts) - 1
        slowest: Floats = np.maximum.reduce(parts)
        return (sum(parts) + (self.count - 1) * slowest) / passes

    def per_layer(self, layers: int) -> Limits:
        """The same for one of the layers."""
        if self.and_wire is None:
            return replace(self, whole=self.whole / layers)
        wire = self.wire[0] / layers, self.wire[1] / layers
        return replace(self, whole=self.whole / layers, and_wire=self.and_wire / layers, wire=wire)


@dataclass(frozen=True)
class Ring:
    """Gradients and weights going round in rings over all units, at their best, and the optimizer's step.

    Args:
        seconds: both together.
        shown: what cannot hide at all.
        share: of a micro-batch's time, the most that they can hide behind.
        forward: whether they hide behind a forward pass too.
        gradients: their part of both.
        step: seconds of the optimizer.
    """

    seconds: float = 0.0
    shown: float = 0.0
    share: float = 0.0
    forward: bool = True
    gradients: float = 1.0
    step: float = 0.0

    @property
    def behind(self) -> list[tuple[int, float]]:
        """Passes, 0 forward and 1 backward, and the seconds of what can hide behind each."""
        if not self.share:
            return []
        if not self.forward:
            return [(1, self.seconds)]
        return [(1, self.gradients * self.seconds), (0, (1 - self.gradients) * self.seconds)]

    def wait_s(self, micro_batch_s: float) -> float:
        """Seconds that they add to an iteration with micro-batches that long, at least."""
        return self.step + max(self.shown, self.seconds - self.share * micro_batch_s)

    def may_show(self, micro_batch_s: float) -> bool:
        """Whether a plan whose other traffic leaves the wire free most of the time might wait for them."""
        return self.seconds > _MOSTLY_FREE * self.share * micro_batch_s > 0

    def micro_batch_s(self, iteration_s: float, count: int, stages: int) -> float:
        """What each of `count` micro-batches may take on each stage, where the wire is free all the time.

        In a pipeline the ring may hide behind any stage: its passes take an iteration's part at most.
        """
        iteration_s -= self.step
        if stages > 1:
            shown = max(self.shown, self.seconds - self.share * iteration_s / count)
            return (iteration_s - shown) / (count + stages - 1)
        whole = (iteration_s - self.shown) / count
        return (
            min(whole, (iteration_s - self.seconds) / (count - self.share)) if count > self.share else whole
        )

    def limits(self, iteration_s: float, count: int, wire: tuple[float, float], stages: int = 1) -> Limits:
        """What each of `count` micro-batches may take in an iteration of T seconds, each of m seconds.

        The ring hides behind the last backward and the first forward pass, in the time that they leave the
        wire free: count x m + ring - (share x m - wire) <= T.

        Args:
            iteration_s: T.
            count: of micro-batches.
            wire: the least and the most that uses the wire, as parts of what there is time for.
            stages: of the pipeline.
        """
        whole = (iteration_s - self.step - self.shown) / count
        if stages > 1 or not self.may_show(whole):
            return Limits(self.micro_batch_s(iteration_s, count, stages), count=count)
        free = iteration_s - self.step - self.seconds
        return Limits(whole, count - self.share, free, (wire[0] * free, wire[1] * free), self.forward)


def least_ring(fleet: Fleet, found_s: float, crosses: bool) -> Ring:
    """The least that gradients and weights take, over at least so many units as could do with `found_s`.

    They hide behind one backward and one forward pass at most.

    Args:
        fleet: the units.
        found_s: an iteration that is known to be possible.
        crosses: whether units of several sites are used.
    """
    job = fleet.job
    units = _fewest_units(fleet, found_s)
    step = _least_step(fleet)
    if units < 2:
        return Ring(step=step)
    again = {"none": 0, "selective": 0, "full": 1}[job.mode]
    share = 1 - (again + (0 if job.distributed_optimizer else 1)) * _forward_share(fleet)
    gradient = GRADIENT_BYTES[job.precision]
    weight = job.element_bytes if job.distributed_optimizer else gradient
    # Of one byte for each weight, on the stage that takes longest.
    each = max(
        stage_params(job, stage) / _bandwidth(fleet, stage, units, crosses)
        for stage in range(job.pipeline_parallel)
    )
    seconds = (units - 1) / units * (gradient + weight) * each
    shown = seconds / job.stage_layers if job.overlap_gradients else seconds
    return Ring(
        seconds=seconds,
        shown=shown,
        share=share if job.overlap_gradients else 0.0,
        forward=job.distributed_optimizer,
        gradients=gradient / (gradient + weight),
        step=step,
    )


def _least_step(fleet: Fleet) -> float:
    """Seconds of the optimizer's step: of the fastest kind, and shared by all units."""
    job, steps = fleet.job, list[float]()
    for stage in range(job.pipeline_parallel):
        params = stage_params(job, stage)
        shard = params / len(fleet.units) if job.distributed_optimizer else float(params)
        speeds = [device_speeds(kind.devices[stage], job) for kind in fleet.kinds]
        steps.append(min(optimizer_seconds(one, job, params, shard) for one in speeds))
    return max(steps)


def _bandwidth(fleet: Fleet, stage: int, units: int, crosses: bool) -> float:
    """Bytes/s of rings over so many units at least, at their best (cost/rings.py)."""
    links = [best_links(fleet, unit, crosses, stage) for unit in range(len(fleet.units))]
    inside = max(one.inside for one in links)
    if not crosses:
        return inside
    members: dict[int, list[Links]] = {}
    for unit, one in zip(fleet.units, links, strict=True):
        members.setdefault(fleet.cluster.ranks[unit.gpus[stage][0]].node, []).append(one)
    # A node passes on what its cards do, with one unit or more; the slowest of those in use sets the pace.
    width, nodes = fleet.job.tensor_parallel, list[tuple[float, int]]()
    for alike in members.values():
        counts = range(1, len(alike) + 1)
        nodes.append((max(_through(alike[0], count, width) for count in counts), len(alike)))
    nodes.sort(reverse=True)
    together = np.cumsum([size for _, size in nodes])
    fewest = max(2, int(np.searchsorted(together, units)) + 1)
    bandwidth = nodes[min(fewest, len(nodes)) - 1][0]
    # Sites that share a node may be crossed on another stage only.
    return bandwidth if len(nodes) == len(fleet.sites) else max(bandwidth, inside)


def _through(links: Links, count: int, width: int) -> float:
    """Bytes/s of all rings together through a node of which so many units are used."""
    cards = links.outside / width if links.shared else links.outside * count
    return min(cards, links.inside * count / (count - 1)) if count > 1 else cards


def _fewest_units(fleet: Fleet, found_s: float) -> int:
    """Units without which `found_s` would be out of reach, each of the fastest for either kind of work."""
    job, rates = fleet.job, Rates(fleet)
    token, attention = (np.cumsum(np.sort(kind)[::-1]) for kind in (rates.token, rates.attention))
    tokens_per_s = job.pipeline_parallel / (1 / token + rates.local_heads / attention)
    needed = job.global_batch_size * job.seq_length / found_s
    return min(len(token), int(np.searchsorted(tokens_per_s, needed * 0.999)) + 1)


def _forward_share(fleet: Fleet) -> float:
    """The least part of a layer's passes that a forward pass is."""
    shares = []
    passes = 1 if fleet.job.recompute == "full" else 0
    for kind in fleet.kinds:
        for device in kind.devices:
            times = token_times(device_speeds(device, fleet.job), fleet.job, np.array([_ROWS]))
            forward, backward = float(times.forward[0]), float(times.backward[0])
            shares.append(forward / (forward * (1 + passes) + backward))
    return min(*shares, _ATTENTION_FORWARD / (1 + passes * _ATTENTION_FORWARD))
