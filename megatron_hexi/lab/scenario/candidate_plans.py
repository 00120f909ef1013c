"""The plans of a scenario: seconds of each under given conditions, and the best plan under them.

Every plan names GPUs of the whole cluster, so that the cost model can evaluate all of them there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.lab.scenario.events import Conditions
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import domain_rows, rank_gpus, unit_rows
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.replan.planning.recut import recut

AS_THE_FILE_SAYS = Conditions()


@dataclass(frozen=True, eq=False)
class PlacedPlan:
    """A plan on the cluster's GPUs."""

    plan: Plan
    job: Job
    units: tuple[tuple[int, ...], ...]
    nodes: frozenset[int]

    @cached_property
    def can_be_cut(self) -> bool:
        """Whether `recut` can move tokens and heads between its units while it runs."""
        return any(row.layers is None and len(row.domain.members) > 1 for row in domain_rows(self.plan))


@dataclass(frozen=True, eq=False)
class PlanPace:
    """Times of an iteration under some conditions: its seconds, and each rank's seconds of work, [R]."""

    seconds: float
    busy_s: Floats


class Plans:
    """Plans of one job on one cluster, each computed once."""

    def __init__(self, plan: Plan, job: Job, request: Request, cluster: Cluster) -> None:
        self.cluster = cluster
        self._request = request
        self._known: list[PlacedPlan] = []
        self._at: Callable[[Conditions], Cluster] = cache(lambda conditions: conditions.apply(cluster))
        self._find = cache(self._ask_planner)
        self._pace = cache(self._estimate)
        self.best_seconds = cache(self._best_seconds)
        self.given = self.add(plan, job)
        self.tokens = job.global_batch_size * job.seq_length  # of an iteration, whatever the plan

    def add(self, plan: Plan, job: Job) -> PlacedPlan:
        """Add a plan of the whole cluster."""
        gpus = rank_gpus(plan, len(self.cluster.ranks))
        rows = unit_rows(plan, stages=job.pipeline_parallel)
        units = tuple(tuple(gpus[rank] for rank in unit.ranks) for unit in rows)
        nodes = frozenset(self.cluster.ranks[gpu].node for unit in units for gpu in unit)
        placed = PlacedPlan(plan, job, units, nodes)
        self._known.append(placed)
        return placed

    def pace(self, placed: PlacedPlan, conditions: Conditions) -> PlanPace:
        """Return the times of an iteration of a plan under some conditions, whose lost nodes are ignored."""
        return self._pace(placed, _at_units(conditions, placed))

    def _estimate(self, placed: PlacedPlan, conditions: Conditions) -> PlanPace:
        cost = CostModel(placed.job, self._at(conditions)).estimate(placed.plan)
        return PlanPace(cost.iteration_s, np.array([rank.compute_s for rank in cost.ranks]))

    def after_loss(self, lost: frozenset[int]) -> PlacedPlan | None:
        """Return the plan for the remaining nodes at the file's rates; ``None``: none fits in memory."""
        return self._find(Conditions(lost=lost)) if lost else self.given

    def _best_seconds(self, conditions: Conditions) -> float | None:
        """Return the seconds of an iteration of the best plan; ``None``: no plan fits on the remaining nodes.

        Candidates are all plans known so far, and those that the planner finds for these conditions: with
        each node at the file's speeds, and at its slowest GPU's, both cut again. The planner takes the GPUs
        of a node as equal; cutting again uses the speed of every GPU.
        """
        level = self._at_nodes(conditions)
        candidates = [self._find(state) for state in dict.fromkeys((replace(level, speeds=()), level))]
        for placed in dict.fromkeys((*candidates, self.given)) if conditions.speeds else ():
            if placed is not None and placed.can_be_cut and not placed.nodes & conditions.lost:
                rates = self._at(_at_units(conditions, placed))
                self.add(recut(placed.plan, placed.job, rates), placed.job)
        usable = [placed for placed in self._known if not placed.nodes & conditions.lost]
        return min((self.pace(placed, conditions).seconds for placed in usable), default=None)

    def _at_nodes(self, conditions: Conditions) -> Conditions:
        """Return conditions in which every GPU is as slow as the slowest of its node."""
        speeds = dict(conditions.speeds)
        leveled = tuple(
            (rank, slowest)
            for number, node in enumerate(self.cluster.nodes)
            if number not in conditions.lost
            and (slowest := min(speeds.get(rank, 1.0) for rank in node.ranks)) != 1
            for rank in node.ranks
        )
        return replace(conditions, speeds=leveled)

    def _ask_planner(self, conditions: Conditions) -> PlacedPlan | None:
        """Return the planner's plan for the remaining nodes, whose GPUs it takes as equal."""
        remaining = [n for n in range(len(self.cluster.nodes)) if n not in conditions.lost]
        if not remaining:
            return None
        cluster = self._at(replace(conditions, lost=frozenset()))
        try:
            planned = find_plan(self._request, cluster.without(conditions.lost))
        except NothingFitsError:
            return None
        there = [rank for node in remaining for rank in self.cluster.nodes[node].ranks]
        gpus = tuple(there[gpu] for gpu in rank_gpus(planned.plan, len(there)))
        return self.add(replace(planned.plan, gpus=gpus), planned.job)


def _at_units(conditions: Conditions, placed: PlacedPlan) -> Conditions:
    """Return conditions in which every GPU of a plan is as slow as the slowest of its unit."""
    speeds = dict(conditions.speeds)
    slow = [(unit, min(speeds.get(gpu, 1.0) for gpu in unit)) for unit in placed.units]
    speeds_of_units = sorted((gpu, speed) for unit, speed in slow if speed != 1 for gpu in unit)
    return Conditions(tuple(speeds_of_units), conditions.links)
