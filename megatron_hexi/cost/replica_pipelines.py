"""Builds the pipelines of all replicas, 1F1B or ministages, from the seconds of each domain of each stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.interleaved_pipeline import InterleavedPipeline
from megatron_hexi.cost.ministage_pipeline import Lane, MinistagePipeline, Passing
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.cost.sections import Section
from megatron_hexi.plan import Plan

#: The lanes of each stage of a replica.
Lanes = tuple[tuple[Lane, ...], ...]


def replica_lanes(
    sections: Sequence[Section],
    costs: Iterable[tuple[Sequence[Phases], Iterable[float]]],
    micro_batches: Ints,
) -> list[Lanes]:
    """Return the lanes of each stage of each replica, [replicas][stages].

    Domains that share each micro-batch are one lane, with the time of the slowest.

    Args:
        sections: the sections of the plan.
        costs: for each section, seconds of a micro-batch by phase, and seconds of one forward pass in it,
            both [domains].
        micro_batches: number of micro-batches of each replica, [replicas].
    """
    found: list[dict[int, dict[tuple[int, ...], Lane]]] = [{} for _ in micro_batches]
    for section, (phases, forward) in zip(sections, costs, strict=True):
        domains = zip(section.replicas.tolist(), section.takes, phases, forward, strict=True)
        for replica, takes, total, ahead in domains:
            own = tuple(range(micro_batches[replica])) if takes is None else takes
            lanes, lane = found[replica].setdefault(section.number, {}), Lane(own, total, float(ahead))
            lanes[own] = max(lanes.get(own, lane), lane, key=lambda one: one.phases.total)
    return [
        tuple(tuple(lane for _, lane in sorted(stages[number].items())) for number in range(len(stages)))
        for stages in found
    ]


def replica_pipelines(
    plan: Plan,
    lanes: Sequence[Lanes],
    borders: tuple[list[Floats], list[Floats]] | None,
    passing: Mapping[tuple[int, int], Passing],
    *,
    chunks: int,
    predictions: int,
) -> tuple[Pipeline | MinistagePipeline | InterleavedPipeline, ...]:
    """Return the pipeline of each replica.

    Args:
        plan: the plan.
        lanes: lanes of each replica's stages, [replicas][stages].
        borders: seconds of activations and of gradients over borders (`border_seconds`); ``None``: sends are
            counted in the stages' time.
        passing: transfers of stages that run ministages in turn, by replica and stage.
        chunks: number of chunks of each stage's layers.
        predictions: number of layers of multi-token prediction, which the last ministage runs.
    """
    pipelines: list[Pipeline | MinistagePipeline | InterleavedPipeline] = []
    for number, (replica, own) in enumerate(zip(plan.replicas, lanes, strict=True)):
        count = sum(len(lane.takes) for lane in own[0])
        none = np.zeros((len(own) - 1, count))
        there, back = (none, none) if borders is None else (borders[0][number], borders[1][number])
        if replica.ministages is None:
            phases = tuple(lane.phases for (lane,) in own)
            pipelines.append(Pipeline(phases, there[:, 0], back[:, 0], count, chunks))
            continue
        sizes = np.array([stage.ministage_sizes for stage in replica.stages], dtype=float)
        sizes[-1, -1] += predictions
        parts = sizes / sizes.sum(axis=1, keepdims=True)
        if replica.is_interleaved:
            only = tuple(lane for (lane,) in own)
            pipelines.append(InterleavedPipeline(only, there[:, 0], back[:, 0], parts))
        else:
            passes = tuple(passing[number, stage] for stage in range(len(own)))
            pipelines.append(MinistagePipeline(own, there, back, parts, passes))
    return tuple(pipelines)
