"""Time and memory of an iteration, in arrays over units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.experts import ExpertsOnRanks
from megatron_hexi.cost.hosts import HostMemoryUse
from megatron_hexi.cost.memory import Holdings, part_host_memory, part_memory
from megatron_hexi.cost.once import Once, iteration_phases, once_an_iteration, optimizer_times
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.reductions import Reductions, repeated_reductions, uneven_reductions
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost
from megatron_hexi.mesh import Mesh
from megatron_hexi.plan import Plan

if TYPE_CHECKING:
    from megatron_hexi.cost.iteration import CostModel


@dataclass(frozen=True, eq=False)
class Timing:
    """Time and memory of a plan's iteration in arrays over units, in which a search finds the bottleneck.

    Lists have one entry for each section; in a plan with a repeated stage these are the pipeline stages.
    A search of a stage's layout reads little more than its layers, so all else is computed when first read.

    Args:
        model: the cost model that timed the plan.
        mesh: the plan's ranks, if its stages differ; ``None``: they are one stage, repeated.
        sections: the sections of the plan: units that are timed together.
        stages: seconds of one micro-batch in each section.
        micro_batches: number of micro-batches of each replica, [replicas].
        experts: routed experts of each section's units; ``None``: the model has none.
    """

    model: CostModel
    plan: Plan
    mesh: Mesh | None
    sections: list[Section]
    stages: list[StageCost]
    micro_batches: Ints
    experts: list[ExpertsOnRanks | None]

    @cached_property
    def reductions(self) -> Reductions:
        """Collectives of gradients and weights, and places of weights, gradients and state."""
        model, sections = self.model, self.sections
        if self.mesh is None:
            return repeated_reductions(model.job, sections, model.rings, model.shards, self.experts)
        return uneven_reductions(self.mesh, model.job, sections, model.rings, model.hosts)

    @cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipeline of each replica, [replicas]."""
        return self.model.pipelines(self)

    @cached_property
    def optimizer(self) -> list[Floats]:
        """Seconds of the optimizer's step of each unit of a section, [U]."""
        found = zip(self.sections, self.experts, self.reductions.owned, self.reductions.present, strict=True)
        return [optimizer_times(*one, self.model.hosts) for one in found]

    @cached_property
    def once(self) -> Once:
        """Seconds of what each stage does once an iteration."""
        return once_an_iteration(self.model.job, self.sections, self.stages, self.reductions, self.optimizer)

    @cached_property
    def holdings(self) -> list[Holdings]:
        """Tokens, heads, micro-batches and experts of each section's units."""
        return [
            Holdings.of_section(section, self.micro_batches, cost.flights, placed)
            for section, cost, placed in zip(self.sections, self.stages, self.experts, strict=True)
        ]

    @cached_property
    def memory(self) -> list[dict[str, Floats]]:
        """Bytes on one GPU of each unit, [U], by term."""
        found, buffers = self.reductions, self.model.message_buffers
        holdings = zip(self.sections, self.holdings, found.owned, found.present, strict=True)
        return [
            part_memory(own.job, own.part, held, own.window, owned, present, buffers(own))
            for own, held, owned, present in holdings
        ]

    @cached_property
    def host_memory(self) -> list[dict[str, Floats]]:
        """Bytes in host memory for one GPU of each unit, [U], by term."""
        holdings = zip(self.sections, self.holdings, self.reductions.present, strict=True)
        return [part_host_memory(own.job, own.part, held, present) for own, held, present in holdings]

    @cached_property
    def host_loads(self) -> tuple[HostMemoryUse, ...]:
        """Loads of the nodes whose host memory is used."""
        return self.model.hosts.loads(
            [section.placement.gpus for section in self.sections],
            [np.sum(list(terms.values()), axis=0) for terms in self.host_memory],
        )

    @cached_property
    def spread(self) -> float:
        """Part by which the slowest GPU's computation takes longer than its kind's."""
        return self.model.spread(self.sections)

    @cached_property
    def replicas(self) -> tuple[Phases, ...]:
        """Seconds of each replica's passes by phase; computed when first read."""
        return tuple(pipeline.phases for pipeline in self.pipelines)

    @cached_property
    def phases(self) -> Phases:
        """Seconds of the iteration by phase."""
        return iteration_phases(self.replicas, self.once, self.spread)

    @property
    def arrays(self) -> PlanArrays:
        """Tokens, heads and groups of the units of each stage, for a plan with a repeated stage."""
        return self.sections[0].arrays

    @property
    def needed(self) -> list[Floats]:
        """Bytes of memory that a GPU of each unit needs, [U] for each section."""
        return [np.sum(list(terms.values()), axis=0) for terms in self.memory]

    @property
    def usable(self) -> list[Floats]:
        """Bytes of memory that a job may use on a GPU of each unit, [U] for each section."""
        return [section.placement.usable for section in self.sections]

    @property
    def fullness(self) -> float:
        """Needed part of the usable memory of the fullest GPU or node; above 1: the plan does not fit."""
        gpus = [
            float((needed / usable).max()) for needed, usable in zip(self.needed, self.usable, strict=True)
        ]
        return max([*gpus, *(load.fullness for load in self.host_loads)])

    @property
    def stage_fullness(self) -> dict[tuple[int, int], float]:
        """Needed part of the usable memory of the fullest GPU of each stage, by replica and stage."""
        found: dict[tuple[int, int], float] = {}
        for section, needed, usable in zip(self.sections, self.needed, self.usable, strict=True):
            for replica, part in zip(section.replica.tolist(), (needed / usable).tolist(), strict=True):
                place = replica, section.number
                found[place] = max(found.get(place, 0.0), part)
        return found

    @property
    def fits(self) -> bool:
        """Whether the memory of every GPU and the host memory of every node suffice."""
        return self.fullness <= 1
