"""What a planner gives, made without one: a proportional plan, its cost, and made-up baselines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from megatron_hexi.cost import Phases, estimate
from megatron_hexi.plan import Estimate, proportional_plan
from megatron_hexi.planner.bound import Bound
from megatron_hexi.planner.result import Planned


def baseline(name, tokens_per_s=None, *, why_not="", layout="as it is", uniform=True) -> Any:
    """A baseline that takes its time for tokens, or one that cannot be done."""
    trial = None
    if tokens_per_s is not None:
        phases = Phases(token=0.75e6 / tokens_per_s, exchange=0.25e6 / tokens_per_s)
        trial = SimpleNamespace(
            tokens_per_s=tokens_per_s, iteration_s=phases.total, timing=SimpleNamespace(phases=phases)
        )
    return SimpleNamespace(
        name=name,
        trial=trial,
        tokens_per_s=tokens_per_s,
        why_not=why_not,
        layout=layout,
        uniform=uniform,
    )


def make_planned(job, cluster, speeds, *, gap=0.25, baselines=(), notes=(), gpus=None):
    """A plan in proportion to speeds (replica, group, member), in so far as all is known of it."""
    plan = replace(proportional_plan(job.workload(), speeds), gpus=gpus)
    job = replace(job, data_parallel=len(speeds))
    cost = estimate(plan, job, cluster)
    bound = Bound(cost.iteration_s / (1 + gap), "every GPU computes at its best rate")
    told = Estimate(cost.iteration_s, cost.tokens_per_s, bound.iteration_s, gap, cost.memory_gib)
    plan = replace(plan, estimate=told)
    for one in baselines:
        if one.trial is not None:  # as far as anybody reads it, the plan's
            one.trial.plan, one.trial.job = plan, job
    return Planned(plan, job, cost, bound, tuple(baselines), trials=7, planning_s=0.5, notes=tuple(notes))
