"""The result of planning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_hexi.cost import IterationCost, Job
from megatron_hexi.plan import Plan
from megatron_hexi.planner.baselines import Baseline
from megatron_hexi.planner.bound import Bound
from megatron_hexi.planner.joint import Candidate


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, its predicted cost, and its largest distance from the best.

    Args:
        plan: with its estimate and provenance.
        job: the job; its `data_parallel` is the plan's.
        cost: what the cost model says of the plan.
        bound: below which no plan can be.
        baselines: what else could have been done; empty where they were not asked for.
        trials: layouts that were timed.
        planning_s: seconds that it took.
        rivals: the next best layouts, the best of each other kind.
        unsaved_s: seconds of the best layout that does nothing for memory but recompute; infinite: none fits.
        notes: what a user should know, one sentence each: GPUs that are left out, and why.
    """

    plan: Plan
    job: Job
    cost: IterationCost
    bound: Bound
    baselines: tuple[Baseline, ...]
    trials: int
    planning_s: float
    notes: tuple[str, ...] = ()
    rivals: tuple[Candidate, ...] = ()
    unsaved_s: float = math.inf

    @property
    def gap(self) -> float:
        """Time above the lower bound, as a part of the bound; 0 is optimal."""
        return max(0.0, self.cost.iteration_s / self.bound.iteration_s - 1)
