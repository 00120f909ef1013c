"""Time and memory of an iteration, in arrays over units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.experts import ExpertsOnRanks
from megatron_hexi.cost.hosts import NodeLoad
from megatron_hexi.cost.ministage_pipeline import MinistagePipeline
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.reductions import Reductions
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost


@dataclass(frozen=True, eq=False)
class Timing:
    """A plan's iteration in arrays over units, for a search that reads what bounds it.

    Lists run over sections; of a plan whose stage the job repeats these are the pipeline stages.

    Args:
        sections: the units, by what they are timed with.
        stages: what the stages of each section do for one micro-batch.
        pipelines: the stages of each replica.
        reductions: what all ranks do together.
        synchronisation: what each replica waits for gradients and weights, s.
        optimizer: the optimizer's step of each section's units, s, [U].
        micro_batches: of each replica.
        experts: routed experts of each section's units; ``None``: the model has none.
        memory: bytes on one GPU of each unit by term, [U].
        host_memory: bytes in host memory for one GPU of each unit by term, [U].
        host_loads: nodes in whose memory something lies.
        spread: part by which the slowest GPU's computation takes longer than its kind's.
    """

    sections: list[Section]
    stages: list[StageCost]
    pipelines: tuple[Pipeline | MinistagePipeline, ...]
    reductions: Reductions
    synchronisation: list[float]
    optimizer: list[Floats]
    micro_batches: Ints
    experts: list[ExpertsOnRanks | None]
    memory: list[dict[str, Floats]]
    host_memory: list[dict[str, Floats]]
    host_loads: tuple[NodeLoad, ...]
    spread: float

    @cached_property
    def replicas(self) -> tuple[Phases, ...]:
        """Phases of each replica's time, the optimizer aside; worked out when it is asked for."""
        both = zip(self.pipelines, self.synchronisation, strict=True)
        return tuple(pipeline.phases + Phases(gradients=wait) for pipeline, wait in both)

    @cached_property
    def phases(self) -> Phases:
        """Phases of the slowest replica, with the optimizer."""
        step = max(float(times.max()) for times in self.optimizer)
        slowest = max(self.replicas, key=lambda phases: phases.total)
        return (slowest + Phases(optimizer=step)).spread_by(self.spread)

    @property
    def arrays(self) -> PlanArrays:
        """Holdings of the units of every stage, of a plan whose stage the job repeats."""
        return self.sections[0].arrays

    @property
    def needed(self) -> list[Floats]:
        """Bytes that a GPU of each unit needs, [U]."""
        return [np.sum(list(terms.values()), axis=0) for terms in self.memory]

    @property
    def usable(self) -> list[Floats]:
        """Bytes that it has, [U]."""
        return [section.placement.usable for section in self.sections]

    @property
    def fullness(self) -> float:
        """The largest part of a GPU's memory that is needed, or of a node's."""
        gpus = [
            float((needed / usable).max()) for needed, usable in zip(self.needed, self.usable, strict=True)
        ]
        return max([*gpus, *(load.fullness for load in self.host_loads)])

    @property
    def stage_fullness(self) -> dict[tuple[int, int], float]:
        """The part of its memory that a GPU needs, at most, by replica and stage."""
        found: dict[tuple[int, int], float] = {}
        for section, needed, usable in zip(self.sections, self.needed, self.usable, strict=True):
            for replica, part in zip(section.replica.tolist(), (needed / usable).tolist(), strict=True):
                place = replica, section.number
                found[place] = max(found.get(place, 0.0), part)
        return found

    @property
    def fits(self) -> bool:
        """Whether every GPU's memory suffices, and every node's."""
        return self.fullness <= 1
