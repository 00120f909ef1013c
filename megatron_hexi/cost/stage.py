"""Seconds of a micro-batch in the stages of one section: their layers, the work outside these, and sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hexi.cost.arrays import Bools, Counts, Ints
from megatron_hexi.cost.collectives import pipeline_seconds
from megatron_hexi.cost.encoder import Encoding, encoding
from megatron_hexi.cost.encoder_bytes import layers_again
from megatron_hexi.cost.ends import EndWork, loss_work
from megatron_hexi.cost.fp8 import computed_rows
from megatron_hexi.cost.known_layers import KnownLayers
from megatron_hexi.cost.layer import ExpertCycle, Layer, Pass
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.model_part import KindLayers
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.sections import Section
from megatron_hexi.mesh import Way


@dataclass(frozen=True, eq=False)
class StageCost:
    """Seconds of one micro-batch in a section: units of a stage that are timed together.

    All but the layers is computed when it is first read.

    Args:
        kinds: seconds of a layer of each kind.
        pipeline_s: exposed seconds of sends to the next stage and of its gradients back; with chunks only of
            the sends, after each chunk's forward pass.
        encoding: seconds of a micro-batch's images; ``None``: the job has none.
        like: cost of the same units with other numbers of layers; ``None``: it is not known.
    """

    section: Section
    kinds: tuple[Layer, ...]
    pipeline_s: float
    like: StageCost | None = None
    encoding: Encoding | None = None

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

    @cached_property
    def _held(self) -> list[KindLayers]:
        return self.section.parts.of_kinds(self.section.job.model)

    @property
    def counts(self) -> list[Counts]:
        """Number of layers of each kind, numbers or [domains]."""
        return [held.layers for held in self._held]

    @property
    def layers(self) -> Counts:
        """Number of all layers, those of multi-token prediction among them, a number or [U]."""
        section = self.section
        return section.part.layers + section.part.predictions(section.job.model).layers

    @cached_property
    def _runs(self) -> list[tuple[Pass, Counts]]:
        """Passes of layers that the units run, with the number of layers of each, numbers or [domains]."""
        section, runs = self.section, list[tuple[Pass, Counts]]()
        twice = section.parts.run_twice(section.job.model)
        for layer, count, again in zip(self.kinds, self._held, twice, strict=True):
            runs += [(layer.forward, count.layers), (layer.backward, count.layers)]
            if section.job.again:
                repeated = layer.forward if layer.again is None else layer.again
                runs.append((repeated, count.again))
            if np.any(section.parts.ministages):
                runs.append((layer.forward, again))
        return runs

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Passes of layers that the units run: forward, backward, and repeated by recomputation."""
        return tuple(work for work, _ in self._runs)

    @property
    def repeats(self) -> tuple[Counts, ...]:
        """Number of layers with which they run each pass, numbers or [U]."""
        unit_replica = self.section.arrays.unit_replica
        counts = (count for _, count in self._runs)
        return tuple(count[unit_replica] if isinstance(count, np.ndarray) else count for count in counts)

    @cached_property
    def first(self) -> tuple[EndWork, ...]:
        """Work of the units of a first stage ahead of its layers; none of images where the job has none."""
        if self.encoding is None:
            return ()
        part = self.section.part
        return (self.encoding.work(layers_again(self.section.job, part.layers, part.again), part),)

    @cached_property
    def last(self) -> EndWork:
        """Work of the units of a last stage behind its layers: output matrix and loss; 0 on others."""
        return loss_work(self.section) if self.like is None else self.like.last

    @property
    def ends(self) -> tuple[EndWork, ...]:
        """All work outside layers."""
        return (*self.first, self.last)

    @cached_property
    def once(self) -> tuple[Mapping[Pass, Phases], ...]:
        """Seconds of one layer of each of `passes` by phase, of each domain."""
        if self.like is not None:
            return self.like.once
        plan, found = self.section.arrays, []
        passes = {
            one: None
            for layer in self.kinds
            for one in (layer.forward, layer.backward, layer.again)
            if one is not None
        }
        for domain in range(len(self.section.replicas)):
            units = np.flatnonzero(plan.unit_replica == domain)
            found.append({one: _pass_phases(plan, one, units) for one in passes})
        return tuple(found)

    @cached_property
    def _domains(self) -> list[tuple[Phases, float]]:
        """Seconds of a micro-batch by phase, and of its forward pass among them, of each domain."""
        section, ends, found = self.section, self.ends, []
        by_domain = [section.by_domain(count) for _, count in self._runs]
        every = len(self._runs) // len(self.kinds)
        for domain, once in enumerate(self.once):
            units = np.flatnonzero(section.arrays.unit_replica == domain)
            counts = [own[domain] for own in by_domain]
            seconds = [once[work] for work, _ in self._runs]
            ahead = Phases().added(seconds[::every], counts[::every])
            whole = Phases(pipeline=self.pipeline_s).added(seconds, counts)
            for end in ends:
                there, back = end.phases(units)
                ahead, whole = ahead + there, whole + there + back
            sent = self.pipeline_s if section.parts.chunks > 1 else 0.0
            found.append((whole, ahead.total + sent))
        return found

    @property
    def replicas(self) -> tuple[Phases, ...]:
        """Seconds of a micro-batch by phase, of each domain; for a repeated stage these are replicas."""
        return tuple(whole for whole, _ in self._domains)

    @property
    def forward_s(self) -> tuple[float, ...]:
        """Seconds of one forward pass of each domain, which are part of these."""
        return tuple(forward for _, forward in self._domains)

    def mean(
        self, value: Callable[[Layer], float], domain: int = 0, counts: Sequence[Counts] | None = None
    ) -> float:
        """Return the mean of a number over the layers of a domain.

        Args:
            counts: number of layers of each kind, numbers or [domains]; ``None``: those of the section.
        """
        if len(self.kinds) == 1:
            return value(self.layer)
        held = self.counts if counts is None else counts
        own = [float(count[domain]) if isinstance(count, np.ndarray) else count for count in held]
        return sum(n * value(layer) for n, layer in zip(own, self.kinds, strict=True)) / sum(own)

    def layer_seconds(self, domain: int) -> list[float]:
        """Return the seconds of one layer of each kind in a domain, each of its passes counted once."""
        every, once = len(self.passes) // len(self.kinds), self.once[domain]
        return [
            sum(once[work].total for work in self.passes[first : first + every])
            for first in range(0, len(self.passes), every)
        ]

    def of_parts(self, section: Section) -> StageCost:
        """Return the seconds of the same section with other numbers of layers in its `parts`."""
        return StageCost(section, self.kinds, self.pipeline_s, self.like or self, self.encoding)


def stage_cost(
    section: Section, known: KnownLayers, following: Ints | None, experts: Sequence[ExpertCycle | None]
) -> StageCost:
    """Return the seconds of one micro-batch in a section.

    Args:
        experts: seconds of the routed experts of a layer of each kind; ``None``: it has none.
        following: first GPU of each unit of the next stage, [U], if sends are exposed; ``None``: there are no
            sends, or they are hidden. With chunks the first stage follows the last.
    """
    job = section.job
    kinds = tuple(known.times(section, *one) for one in zip(job.kinds, experts, strict=True))
    send = 0.0
    if following is not None:
        # Megatron's interleaved schedule waits for activations (schedules.py, `post_forward`), and leaves
        # gradients in flight; the model's last chunk sends none.
        parts = section.parts
        turns = 2 if parts.chunks == 1 else parts.chunks - int(np.any(parts.is_last))
        gpus = section.placement.stage.gpus
        rows = computed_rows(job, section.arrays.tokens.astype(float), section.placement.stage.in_fp8)
        send = turns * pipeline_seconds(known.links, job, rows, gpus, following)
    return StageCost(section, kinds, send, encoding=encoding(section, known.links))


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
