"""Time and memory of an iteration, in arrays over units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.experts import ExpertsOnRanks
from megatron_hexi.cost.hosts import HostMemoryUse
from megatron_hexi.cost.once import Once, iteration_phases
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.reductions import Reductions
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost


@dataclass(frozen=True, eq=False)
class Timing:
    """Time and memory of a plan's iteration in arrays over units, in which a search finds the bottleneck.

    Lists have one entry for each section; in a plan with a repeated stage these are the pipeline stages.

    Args:
        sections: the sections of the plan: units that are timed together.
        stages: seconds of one micro-batch in each section.
        pipelines: the pipeline of each replica, [replicas].
        reductions: collectives of gradients and weights, and places of weights, gradients and state.
        once: what each stage does once an iteration.
        optimizer: seconds of the optimizer's step of each unit of a section, [U].
        micro_batches: number of micro-batches of each replica, [replicas].
        experts: routed experts of each section's units; ``None``: the model has none.
        memory: bytes on one GPU of each unit, [U], by term.
        host_memory: bytes in host memory for one GPU of each unit, [U], by term.
        host_loads: loads of the nodes whose host memory is used.
        spread: part by which the slowest GPU's computation takes longer than its kind's.
    """

    sections: list[Section]
    stages: list[StageCost]
    pipelines: tuple[Pipeline, ...]
    reductions: Reductions
    once: Once
    optimizer: list[Floats]
    micro_batches: Ints
    experts: list[ExpertsOnRanks | None]
    memory: list[dict[str, Floats]]
    host_memory: list[dict[str, Floats]]
    host_loads: tuple[HostMemoryUse, ...]
    spread: float

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
