"""Builds the pipelines of all replicas from the seconds of each domain of each stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.lanes import Lane, Passing
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost
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
        costs: for each section, seconds of a micro-batch by phase, and seconds of one forward pass in it,
            both [domains].
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


def ministage_parts(sections: Sequence[Section], costs: Sequence[StageCost]) -> dict[tuple[int, int], Floats]:
    """Return the part of a stage's work in each of its ministages, by replica and stage: [ministages] each.

    The parts are shares of the time of the stage's first domain; layers of one kind count equally. Images are
    encoded in the first ministage.
    """
    parts = dict[tuple[int, int], Floats]()
    for section, cost in zip(sections, costs, strict=True):
        layers = section.parts.in_ranges(section.job.model)
        if layers[0].shape[-1] == 1:
            continue
        more = section.parts.predictions(section.job.model).layers
        for domain, (replica, predictions) in enumerate(
            zip(section.replicas.tolist(), section.by_domain(more), strict=True)
        ):
            if (replica, section.number) in parts:
                continue
            seconds = cost.layer_seconds(domain) if len(layers) > 1 or cost.first else [1.0]
            work = sum(own[domain] * one_s for own, one_s in zip(layers, seconds, strict=True))
            work = work[work > 0]  # empty ranges stand for ministages that other replicas have
            units = np.flatnonzero(section.arrays.unit_replica == domain)
            work[0] += sum(phases.total for end in cost.first for phases in end.phases(units))
            work[-1] += predictions * seconds[section.job.model.kind_of_layers[-1]]
            parts[replica, section.number] = work / work.sum()
    return parts


def replica_pipelines(
    plan: Plan,
    lanes: Sequence[Lanes],
    borders: tuple[list[Floats], list[Floats]] | None,
    passing: Mapping[tuple[int, int], Passing],
    parts: Mapping[tuple[int, int], Floats],
    *,
    chunks: int,
) -> tuple[Pipeline, ...]:
    """Return the pipeline of each replica.

    Args:
        borders: seconds of activations and of gradients over borders (`border_seconds`); ``None``: sends are
            counted in the stages' time.
        passing: transfers of stages that run ministages in turn, by replica and stage.
        parts: part of a stage's work in each ministage, by replica and stage (`ministage_parts`); left out:
            the stage has one.
    """
    pipelines = []
    for number, (replica, own) in enumerate(zip(plan.replicas, lanes, strict=True)):
        none = np.zeros((len(own) - 1, sum(len(lane.takes) for lane in own[0])))
        there, back = (none, none) if borders is None else (borders[0][number], borders[1][number])
        equal = np.full(chunks, 1 / chunks)
        shares = np.array([parts.get((number, stage), equal) for stage in range(len(own))])
        in_turn = replica.ministages is not None and not replica.is_interleaved
        passes = tuple(passing[number, stage] for stage in range(len(own))) if in_turn else None
        pipelines.append(Pipeline(own, there, back, shares, passes, posts_ahead=chunks == 1))
    return tuple(pipelines)
