"""What replicas there may be, and what each takes by itself: part of the lower bound (replicas.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

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


def replica_shapes(fleet: Fleet, classes: Sequence[SiteClass], data_parallel: int | None) -> Sequence[Shape]:
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


class ReplicaChoices:
    """Replicas on units of some shapes, each looked at by itself; what has been looked at is kept.

    Args:
        fleet: all units.
        classes: of their sites.
        shapes: units that a replica may have.
        demand: what there is to do.
        longest_s: an iteration that is known to be possible.
        proof: what each may take.
    """

    def __init__(
        self,
        fleet: Fleet,
        classes: Sequence[SiteClass],
        shapes: Sequence[Shape],
        demand: Demand,
        longest_s: float,
        proof: Proof,
    ) -> None:
        job = fleet.job
        self._job, self._shapes, self._demand = job, shapes, demand
        self._longest_s, self._proof, self._shards = longest_s, proof, len(fleet.units)
        self._units = [site.size * site.count for site in classes]
        self._parts = [fleet.subset(_members(classes, shape)) for shape in shapes]
        tokens = job.seq_length * job.micro_batch_size
        self._rates = np.array([part.ceiling_tokens_per_s for part in self._parts]) / tokens
        #: By the number of a shape and micro-batches.
        self._packings: dict[tuple[int, int], Packing] = {}

    def together(self, closely: bool) -> Replicas:
        """Micro-batches by replicas; `closely`: with whole groups too."""
        job, demand = self._job, self._demand
        together = job.global_batch_size // job.micro_batch_size
        return Replicas(
            self._shapes,
            self._units,
            demand.turns,
            together,
            job.pipeline_parallel,
            demand.ring,
            self._rates,
            partial(self._may, closely),
        )

    def _may(self, closely: bool, number: int, count: int, each_s: float) -> bool:
        """Whether a replica of so many micro-batches may pass each through a stage in so many seconds."""
        stages, ring = self._job.pipeline_parallel, self._demand.ring
        # Without a pipeline, micro-batches are alike: one of them is looked at.
        turns = count if stages > 1 else 1
        passes = turns + stages - 1
        if (number, count) not in self._packings:
            most_s = passes * ring.micro_batch_s(self._longest_s, count, stages)
            self._packings[number, count] = self._alone(number, turns, most_s)
        return self._packings[number, count].suffices(passes * each_s, closely)

    def _alone(self, number: int, micro_batches: int, longest_s: float) -> Packing:
        """A replica on all units of a shape, beside others."""
        batch = micro_batches * self._job.micro_batch_size
        job = replace(self._job, data_parallel=1, global_batch_size=batch)
        alone = replace(self._parts[number], job=job)
        crosses = len(alone.sites) > 1
        classes = classes_of(sites_of(alone, crosses, Prices((1.0,), {}, {}), self._shards))
        proof = self._proof._replace(nested=self._proof.nested_alone)
        return Packing(job, classes, [micro_batches], False, Ring(), (0.0, longest_s), proof)


def _members(classes: Sequence[SiteClass], shape: Shape) -> list[int]:
    """Units of a shape."""
    sites = [iter(of_class.sites) for of_class in classes]
    return [unit for place, units in shape for unit in next(sites[place])[:units]]
