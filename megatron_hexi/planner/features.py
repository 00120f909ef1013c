"""The means of a plan beyond Megatron's flags: which it uses, and which a request allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from megatron_hexi.cluster import Cluster
from megatron_hexi.models import Job
from megatron_hexi.options.plan_job import kind_of
from megatron_hexi.plan import Plan, Stage
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.plan.units import expert_domains, rank_gpus
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


def _has_unequal_shares(plan: Plan) -> bool:
    """Whether members of a domain differ in their numbers of tokens or heads."""
    return any(
        len({(member.tokens, member.heads[1] - member.heads[0]) for member in domain.members}) > 1
        for stage in plan.stages
        for domain in stage.domains
    )


def _divides_samples(plan: Plan) -> bool:
    """Whether domains of a stage take samples; with experts, as Megatron's do, whether numbers differ."""
    least = 1 if plan.workload.experts is None else 2
    shares = ({domain.samples for domain in stage.domains} for stage in plan.stages if len(stage.domains) > 1)
    return any(len(numbers) >= least for numbers in shares)


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


#: Means of plans in words, and whether a plan uses them. Of plans that are about as fast, the one with the
#: fewest means is the simplest.
_MEANS: Final[dict[str, Callable[[Plan], bool]]] = {
    "host memory": USES["offload"],
    "ministages": USES["ministages"],
    "unequal replicas": USES["unequal_replicas"],
    "stages with layers of their own": USES["unequal_stages"],
    "unequal experts": USES["unequal_experts"],
    "unequal shares of sequences": _has_unequal_shares,
    "samples divided among the GPUs of a stage": _divides_samples,
    "unequal shares of optimizer state": lambda plan: len({member.state for member in plan.members}) > 1,
}


def means_of(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Return, in words, the means of a plan that Megatron's flags on all GPUs lack."""
    used = tuple(words for words, uses in _MEANS.items() if uses(plan))
    idle = len(cluster.ranks) - len(set(rank_gpus(plan, len(cluster.ranks))))
    left_out = [f"{idle} GPU{'' if idle == 1 else 's'} left out"] if idle else []
    return (*used, *left_out)


def is_allowed(plan: Plan, job: Job, request: Request) -> bool:
    """Whether a plan and its job use only features that a request allows, and the sizes that it fixes."""
    return not forbidden_by(plan, job, request)


def forbidden_by(plan: Plan, job: Job, request: Request) -> str:
    """Return the flag of a request that a plan and its job break; empty: they keep all rules and sizes."""
    size = request.context_parallel
    if size is not None and any(
        len(domain.members) != size for stage in plan.stages for domain in stage.domains
    ):
        return spell_flag("context_parallel", size)
    chunks = request.virtual_stages
    if chunks is not None and chunks > 1 and job.virtual_stages != chunks:
        return spell_flag("virtual_stages", chunks)
    size = request.expert_parallel
    if size is not None and any(
        len(domain) != size
        for stage in plan.stages
        for domain in expert_domains(stage, plan.workload.experts or 0)
    ):
        return spell_flag("expert_parallel", size)
    return next((spell_flag(name, False) for name in request.rules.refused if USES[name](plan)), "")
