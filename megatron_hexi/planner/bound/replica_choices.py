"""What replicas there may be, and what each takes by itself: part of the lower bound (replicas.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.planner.bound.groups.site_times import Shape, SiteClass
from megatron_hexi.planner.bound.packings.packing import Packing, shapes_of
from megatron_hexi.planner.bound.pieces.demand import Demand
from megatron_hexi.planner.bound.pieces.gradients import Ring
from megatron_hexi.planner.bound.pieces.prices import Prices
from megatron_hexi.planner.bound.replicas import Replicas
from megatron_hexi.planner.bound.site_classes import classes_of, sites_of
from megatron_hexi.planner.budget import Proof
from megatron_hexi.planner.fleet.room import has_room
from megatron_hexi.planner.fleet.units import Fleet


def replica_choices(fleet: Fleet, classes: Sequence[SiteClass], data_parallel: int | None) -> Sequence[Shape]:
    """Units that a replica may have, if a sequence may fit into their memory.

    Args:
        fleet: all units.
        classes: of their sites.
        data_parallel: replicas, equal in size; ``None``: as many as a plan likes.
    """
    most = len(fleet.units) // (data_parallel or 1)
    return [
        shape
        for shape in shapes_of(classes)
        if sum(units for _, units in shape) <= most and _has_room(fleet.job, classes, shape)
    ]


def _has_room(job: Job, classes: Sequence[SiteClass], shape: Shape) -> bool:
    """Whether a sequence may fit into a replica's memory."""
    return has_room(
        job,
        (
            [(units, classes[place].rooms[0][stage]) for place, units in shape]
            for stage in range(job.pipeline_parallel)
        ),
    )


def replicas_of(
    fleet: Fleet,
    classes: Sequence[SiteClass],
    shapes: Sequence[Shape],
    demand: Demand,
    longest_s: float,
    packings: dict[tuple[int, int], Packing],
    proof: Proof,
    closely: bool,
) -> Replicas:
    """Micro-batches by replicas on such units.

    Args:
        fleet: all units.
        classes: of their sites.
        shapes: units that a replica may have.
        demand: what there is to do.
        longest_s: an iteration that is known to be possible.
        packings: what has been looked at before, by the number of a shape and micro-batches.
        proof: what each may take.
        closely: whether to look at whole groups too.
    """
    job, ring, stages = fleet.job, demand.ring, fleet.job.pipeline_parallel
    together = job.global_batch_size // job.micro_batch_size
    parts = [fleet.subset(_members(classes, shape)) for shape in shapes]
    rates = np.array([part.ceiling_tokens_per_s for part in parts]) / (job.seq_length * job.micro_batch_size)

    def may(number: int, count: int, each_s: float) -> bool:
        # Without a pipeline, micro-batches are alike: one of them is looked at.
        turns = count if stages > 1 else 1
        passes = turns + stages - 1
        if (number, count) not in packings:
            most_s = passes * ring.micro_batch_s(longest_s, count, stages)
            packings[number, count] = _alone(parts[number], turns, len(fleet.units), most_s, proof)
        return packings[number, count].suffices(passes * each_s, closely)

    units = [site.size * site.count for site in classes]
    return Replicas(shapes, units, demand.turns, together, stages, ring, rates, may)


def _members(classes: Sequence[SiteClass], shape: Shape) -> list[int]:
    """Units of a shape."""
    sites = [iter(of_class.sites) for of_class in classes]
    return [unit for place, units in shape for unit in next(sites[place])[:units]]


def _alone(fleet: Fleet, micro_batches: int, shards: int, longest_s: float, proof: Proof) -> Packing:
    """A replica on all of a fleet's units, beside others."""
    job = replace(fleet.job, data_parallel=1, global_batch_size=micro_batches * fleet.job.micro_batch_size)
    alone, crosses = replace(fleet, job=job), len(fleet.sites) > 1
    classes = classes_of(sites_of(alone, crosses, Prices((1.0,), {}, {}), shards))
    proof = proof._replace(nested=proof.nested_alone)
    return Packing(job, classes, [micro_batches], False, Ring(), (0.0, longest_s), proof)
