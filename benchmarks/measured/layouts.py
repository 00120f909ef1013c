"""What is run side by side: the plan, and every baseline laid out as well as its rules allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_hexi.cluster import Cluster
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan, plan_digest
from megatron_hexi.planner import Planned

#: The plan's own name among the layouts.
PLAN = "plan"


@dataclass(frozen=True, eq=False)
class Layout:
    """One way to cut the job.

    Args:
        name: ``plan``, or the baselines' that it is the best layout of.
        plan: what the runtime carries out.
        job: as the plan runs it.
        gpus: of the cluster that it uses, ascending.
        text: what it is, for people.
        uniform: whether all of its GPUs get equal tokens and heads.
        predicted_s: what the cost model says of an iteration.
        beside: name of the layout that it is compared with; empty: the plan.
    """

    name: str
    plan: Plan
    job: Job
    gpus: tuple[int, ...]
    text: str
    uniform: bool
    predicted_s: float
    beside: str = ""


def find_layouts(
    planned: Planned, cluster: Cluster, names: Collection[str] | None = None
) -> tuple[list[Layout], dict[str, str]]:
    """All that differ, the plan first, and why a baseline has none.

    Args:
        planned: with its baselines.
        cluster: what it was planned on.
        names: of the baselines; ``None``: all.
    """
    found = [
        Layout(
            PLAN, planned.plan, planned.job, _gpus(planned.plan, cluster), "", False, planned.cost.iteration_s
        )
    ]
    missing = {}
    for baseline in planned.baselines:
        if names is not None and baseline.name not in names:
            continue
        if baseline.trial is None:
            missing[baseline.name] = baseline.why_not
            continue
        plan, job = baseline.trial.plan, baseline.trial.job
        predicted, gpus = baseline.trial.iteration_s, _gpus(plan, cluster)
        found.append(Layout(baseline.name, plan, job, gpus, baseline.layout, baseline.uniform, predicted))
    return list(_merged(found)), missing


def _merged(layouts: list[Layout]) -> Iterator[Layout]:
    """Layouts that are the same plan are one, by all of its names."""
    alike: dict[tuple[str, tuple[int, ...]], list[Layout]] = {}
    for layout in layouts:
        alike.setdefault((plan_digest(layout.plan), layout.gpus), []).append(layout)
    for same in alike.values():
        first = same[0]
        uniform = any(one.uniform for one in same)
        name = ", ".join(one.name for one in same)
        yield Layout(name, first.plan, first.job, first.gpus, same[-1].text, uniform, first.predicted_s)


def _gpus(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    return plan.gpus if plan.gpus is not None else tuple(range(len(cluster.ranks)))
