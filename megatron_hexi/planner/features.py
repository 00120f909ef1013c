"""Features that a plan uses beyond Megatron, and whether a request allows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from megatron_hexi.models import Job
from megatron_hexi.options.plan_job import kind_of
from megatron_hexi.plan import Plan, Stage
from megatron_hexi.plan.units import expert_domains
from megatron_hexi.planner.request import Request


def _has_unequal_replicas(plan: Plan) -> bool:
    """Whether replicas differ in stages or micro-batches; if their stage is repeated, also in rank order."""
    if kind_of(plan) != "stages":
        return kind_of(plan) == "unequal"
    kinds = {
        (replica.micro_batches, replica.order, *(_size(stage) for stage in replica.stages))
        for replica in plan.replicas
    }
    return len(kinds) > 1


def _has_unequal_stages(plan: Plan) -> bool:
    """Whether stages state `layers`; with experts, which need that, whether numbers of layers differ."""
    if plan.workload.experts is None:
        return kind_of(plan) == "stages"
    return len({sum(stage.ministage_sizes) for stage in plan.stages}) > 1


def _has_unequal_experts(plan: Plan) -> bool:
    """Whether numbers of experts on the ranks of an expert domain differ by more than one."""
    total = plan.workload.experts
    if total is None:
        return False
    domains = [domain for stage in plan.stages for domain in expert_domains(stage, total)]
    counts = [[held.count for held in domain] for domain in domains]
    return any(max(one) - min(one) > 1 for one in counts)


def _size(stage: Stage) -> tuple[object, ...]:
    """Return the properties that stages at the same position of equal replicas share."""
    widths = tuple(sorted(len(member.ranks) for member in stage.members))
    return stage.layers, widths, stage.recompute, stage.ministages, stage.offload


#: Whether a plan uses each feature, by the fields of `PlannerRules`.
USES: Final[dict[str, Callable[[Plan], bool]]] = {
    "ministages": lambda plan: any(stage.ministages is not None for stage in plan.stages),
    "offload": lambda plan: any(stage.offload for stage in plan.stages),
    "unequal_replicas": _has_unequal_replicas,
    "unequal_stages": _has_unequal_stages,
    "unequal_experts": _has_unequal_experts,
}


def features_of(plan: Plan) -> tuple[str, ...]:
    """Return the names of the features that a plan uses, which are fields of `PlannerRules`."""
    return tuple(name for name, uses in USES.items() if uses(plan))


def is_allowed(plan: Plan, job: Job, request: Request) -> bool:
    """Whether a plan and its job use only features that a request allows, and the sizes that it fixes."""
    size = request.context_parallel
    if size is not None and any(
        len(domain.members) != size for stage in plan.stages for domain in stage.domains
    ):
        return False
    if (request.virtual_stages or 1) > 1 and job.virtual_stages != request.virtual_stages:
        return False
    size = request.expert_parallel
    if size is not None and any(
        len(domain) != size
        for stage in plan.stages
        for domain in expert_domains(stage, plan.workload.experts or 0)
    ):
        return False
    return not any(USES[name](plan) for name in request.rules.refused)
