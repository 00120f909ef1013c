"""The result of planning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_hexi.cost import IterationCost
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.planner.baselines import Baseline
from megatron_hexi.planner.bound import Bound
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.simplest import Choice


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, its predicted cost, and its largest distance from the best.

    Args:
        plan: the plan, with its estimate and provenance.
        job: the job with the terms that the planner chose.
        bound: the lower bound over all plans.
        baselines: the baselines with their best layouts; empty if they were not asked for.
        trials: number of layouts that were timed.
        planning_s: seconds that planning took.
        rivals: the best layouts of other kinds, fastest first, see `best_of_each_kind`.
        unsaved_s: seconds of an iteration of the best layout that saves no memory but by recomputation;
            infinite: none fits.
        choice: the plan's means, and plans that are faster or simpler.
        notes: sentences for the user: how memory or time is saved, which GPUs are left out, and why.
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
    choice: Choice | None = None

    @property
    def gap(self) -> float:
        """Time above the lower bound, as a part of the bound; 0 is optimal."""
        return max(0.0, self.cost.iteration_s / self.bound.iteration_s - 1)
