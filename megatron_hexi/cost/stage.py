"""Seconds of a micro-batch in the stages of one section: their layers, logits and sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Bools, Counts, Floats, Ints
from megatron_hexi.cost.collectives import loss_sum_seconds, pipeline_seconds
from megatron_hexi.cost.compute import logits_times
from megatron_hexi.cost.fp8 import computed_rows
from megatron_hexi.cost.known_layers import KnownLayers
from megatron_hexi.cost.layer import ExpertCycle, Layer, Pass, UnitGpus
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.sections import Section
from megatron_hexi.mesh import Way
from megatron_hexi.models.job import Job


@dataclass(frozen=True, eq=False)
class StageCost:
    """Seconds of one micro-batch in a section: units of a stage that are timed together.

    Args:
        kinds: seconds of a layer of each kind.
        counts: number of layers of each kind, numbers or [domains].
        layers: number of all layers, those of multi-token prediction among them, a number or [U].
        passes: passes of layers that the units run: forward, backward, and repeated by recomputation.
        repeats: number of layers with which they run each pass, numbers or [U].
        logits: seconds of each unit's output matrix and loss, [U]; 0 except on a last stage.
        logits_sum: seconds of the collectives inside each unit that these need, [U].
        pipeline_s: exposed seconds of sends to the next stage and of its gradients back; with chunks only of
            the sends, after each chunk's forward pass.
        replicas: seconds of a micro-batch by phase, of each domain; for a repeated stage these are replicas.
        forward_s: seconds of one forward pass of each domain, which are part of these.
        once: seconds of one layer of each of `passes` by phase, of each domain.
    """

    kinds: tuple[Layer, ...]
    counts: tuple[Counts, ...]
    layers: Counts
    passes: tuple[Pass, ...]
    repeats: tuple[Counts, ...]
    logits: Floats
    logits_sum: Floats
    pipeline_s: float
    replicas: tuple[Phases, ...]
    forward_s: tuple[float, ...]
    once: tuple[Mapping[Pass, Phases], ...]

    @property
    def layer(self) -> Layer:
        """Seconds of a layer, if all layers are of one kind."""
        (layer,) = self.kinds
        return layer

    @property
    def flights(self) -> Flights:
        """Most keys that the exchange of any kind of layer has in flight."""
        first, *more = (layer.flights for layer in self.kinds)
        for flights in more:
            received, sent = (
                np.maximum(first.received, flights.received),
                np.maximum(first.sent, flights.sent),
            )
            first = Flights(received, sent)
        return first

    def mean(self, value: Callable[[Layer], float], domain: int = 0) -> float:
        """Return the mean of a number over the layers of a domain."""
        if len(self.kinds) == 1:
            return value(self.layer)
        counts = [float(held[domain]) if isinstance(held, np.ndarray) else held for held in self.counts]
        return sum(n * value(layer) for n, layer in zip(counts, self.kinds, strict=True)) / sum(counts)

    def layer_seconds(self, domain: int) -> list[float]:
        """Return the seconds of one layer of each kind in a domain, each of its passes counted once."""
        every, once = len(self.passes) // len(self.kinds), self.once[domain]
        return [
            sum(once[work].total for work in self.passes[first : first + every])
            for first in range(0, len(self.passes), every)
        ]

    def of_parts(self, section: Section) -> StageCost:
        """Return the seconds of the same section with other numbers of layers in its `parts`."""
        return _of_layers(section, self.kinds, self.logits, self.logits_sum, self.pipeline_s, self.once)


def stage_cost(
    section: Section, known: KnownLayers, following: Ints | None, experts: ExpertCycle | None = None
) -> StageCost:
    """Return the seconds of one micro-batch in a section.

    Args:
        following: first GPU of each unit of the next stage, [U], if sends are exposed; ``None``: there are no
            sends, or they are hidden. With chunks the first stage follows the last.
    """
    job, stage = section.job, section.placement.stage
    kinds = tuple(known.times(section, kind, experts if kind.model.experts else None) for kind in job.kinds)
    rows = computed_rows(job, section.arrays.tokens.astype(float), stage.in_fp8)
    logits, sums = np.zeros(len(rows)), np.zeros(len(rows))
    if np.any(section.parts.is_last):
        logits = section.part.is_last * _logits(job, stage, rows)
        sums = section.part.is_last * loss_sum_seconds(job, rows, stage.bandwidth, stage.latency)
    send = 0.0
    if following is not None:
        # Megatron's interleaved schedule waits for activations (schedules.py, `post_forward`), and leaves
        # gradients in flight; the model's last chunk sends none.
        parts = section.parts
        turns = 2 if parts.chunks == 1 else parts.chunks - int(np.any(parts.is_last))
        send = turns * pipeline_seconds(known.links, job, rows, stage.gpus, following)
    plan = section.arrays
    passes = {
        one: None
        for layer in kinds
        for one in (layer.forward, layer.backward, layer.attention_again)
        if one is not None
    }
    once = []
    for domain in range(len(section.replicas)):
        units = np.flatnonzero(plan.unit_replica == domain)
        once.append({one: _pass_phases(plan, one, units) for one in passes})
    return _of_layers(section, kinds, logits, sums, send, tuple(once))


def _of_layers(
    section: Section,
    kinds: tuple[Layer, ...],
    logits: Floats,
    sums: Floats,
    send: float,
    once: tuple[Mapping[Pass, Phases], ...],
) -> StageCost:
    """Return the seconds of one micro-batch in a section, from those of a layer of each kind.

    Args:
        logits: seconds of each unit's output matrix and loss, [U].
        sums: seconds of the collectives inside each unit that these need, [U].
        once: seconds of one layer's passes by phase, of each domain.
    """
    plan, job, parts = section.arrays, section.job, section.parts
    passes, repeats = list[Pass](), list[Counts]()
    held = parts.of_kinds(job.model)
    for layer, count, again in zip(kinds, held, parts.run_twice(job.model), strict=True):
        passes += [layer.forward, layer.backward]
        repeats += [count.layers, count.layers]
        if job.mode != "none":
            passes.append(layer.forward if layer.attention_again is None else layer.attention_again)
            repeats.append(count.again)
        if np.any(parts.ministages):
            passes.append(layer.forward)
            repeats.append(again)
    by_domain = [section.by_domain(counts) for counts in repeats]
    replicas, forward = [], []
    for domain in range(len(section.replicas)):
        units, counts = np.flatnonzero(plan.unit_replica == domain), [own[domain] for own in by_domain]
        seconds, every = [once[domain][work] for work in passes], len(passes) // len(kinds)
        ahead = Phases().added(seconds[::every], counts[::every])
        forward.append(ahead.total + (send if parts.chunks > 1 else 0.0))
        slowest = units[np.argmax((logits + sums)[units])]
        ends = Phases(logits=float(logits[slowest]), tensor_parallel=float(sums[slowest]))
        replicas.append(Phases(pipeline=send).added(seconds, counts) + ends)
    return StageCost(
        kinds=kinds,
        counts=tuple(count.layers for count in held),
        layers=section.part.layers + section.part.predictions(job.model).layers,
        passes=tuple(passes),
        repeats=tuple(
            counts[plan.unit_replica] if isinstance(counts, np.ndarray) else counts for counts in repeats
        ),
        logits=logits,
        logits_sum=sums,
        pipeline_s=send,
        replicas=tuple(replicas),
        forward_s=tuple(forward),
        once=once,
    )


def _pass_phases(plan: PlanArrays, one: Pass, units: Ints) -> Phases:
    """Return the seconds of a layer's pass by phase, in the group with most work; the rest is exchange.

    The group that ends last need not have most work: it may only wait for another group's last gradients.
    """
    busiest = units[np.argmax(one.undisturbed[units])]
    members = plan.slots[plan.first_slot[plan.group[busiest]] : plan.first_slot[plan.group[busiest] + 1]]
    experts = one.experts + one.expert_exchange + one.expert_wait
    first = members[np.argmax((one.token + one.tensor_parallel + experts)[members])]
    moves = float((one.expert_exchange + one.expert_wait)[first])
    return Phases(
        token=float((one.token + one.experts)[first]),
        tensor_parallel=float(one.tensor_parallel[first]),
        all_to_all=float(one.all_to_all_in[busiest] + one.all_to_all_out[busiest]) + moves,
        attention=float(one.attention[busiest]),
        exchange=one.exposed_exchange(units),
    )


def free_network(way: Way, units: Bools, layer: Layer) -> float:
    """Return the seconds of a layer's pass on some units in which the network is free."""
    one: Pass = getattr(layer, way)
    return max(0.0, float(one.finish[units].max()) - one.wire)


def _logits(job: Job, stage: UnitGpus, rows: Floats) -> Floats:
    times = np.zeros(len(rows))
    for speeds, units in stage.by_kind:
        times[units] = sum(logits_times(speeds, job, rows[units]))
    return times
