"""From what each domain of a stage takes to the pipelines of the replicas, in 1F1B or in ministages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.ministage_pipeline import MinistagePipeline, Passing
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost
from megatron_hexi.plan import Plan


def replica_pipelines(
    plan: Plan,
    sections: Sequence[Section],
    costs: Sequence[StageCost],
    borders: tuple[list[Floats], list[Floats]] | None,
    micro_batches: Ints,
    passing: Mapping[tuple[int, int], Passing],
) -> tuple[Pipeline, ...]:
    """The stages of each replica; a stage is as slow as its slowest domain.

    Args:
        plan: the plan.
        sections: the units.
        costs: of the sections.
        borders: as of `border_seconds`; ``None``: nothing travels beside the stages' work.
        micro_batches: of each replica.
        passing: what comes and goes of a replica's stage that runs in ministages.
    """
    slowest: list[dict[int, tuple[Phases, float]]] = [{} for _ in micro_batches]
    for section, cost in zip(sections, costs, strict=True):
        domains = zip(cost.replicas, cost.forward_s, strict=True)
        for replica, one in zip(section.replicas.tolist(), domains, strict=True):
            stages = slowest[replica]
            stages[section.number] = max(
                stages.get(section.number, one), one, key=lambda found: found[0].total
            )
    pipelines = []
    for replica, stages in enumerate(slowest):
        phases, forward = zip(*(stages[number] for number in range(len(stages))), strict=True)
        none = np.zeros(len(stages) - 1)
        there, back = (none, none) if borders is None else (borders[0][replica], borders[1][replica])
        count, parts = int(micro_batches[replica]), plan.replicas[replica].ministages
        if parts is None:
            pipelines.append(Pipeline(phases, there, back, count))
        else:
            sizes = np.array([stage.ministage_sizes for stage in plan.replicas[replica].stages], dtype=float)
            own = tuple(passing[replica, number] for number in range(len(stages)))
            part = sizes / sizes.sum(axis=1, keepdims=True)
            pipelines.append(MinistagePipeline(phases, there, back, count, part, np.array(forward), own))
    return tuple(pipelines)
