"""Changes of a plan's stages and members, and a plan written with layers in each stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megatron_hexi.cluster import Cluster, cluster_digest
from megatron_hexi.models import Job
from megatron_hexi.plan import Member, Plan, Replica, Stage
from megatron_hexi.plan.recompute import Recompute
from megatron_hexi.plan.terms import Offload
from megatron_hexi.plan.units import DomainRow, domain_rows, rank_gpus

#: A stage of a plan: numbers of its replica, and of the stage in it.
type Place = tuple[int, int]


class MemoryOption(NamedTuple):
    """Recomputation and offload of a stage, to save memory."""

    recompute: Recompute
    offload: tuple[Offload, ...] = ()


def stages_of(plan: Plan) -> Iterator[tuple[Place, Stage]]:
    """Yield each stage with its place."""
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            yield (r, s), stage


def with_stages(
    plan: Plan, change: Callable[[Place, Stage], Stage], counts: Sequence[int] | None = None
) -> Plan:
    """Return the plan with every stage changed.

    Args:
        counts: micro-batches of each replica; ``None``: as in the plan.
    """
    replicas = (
        replace(
            replica,
            stages=tuple(change((r, s), stage) for s, stage in enumerate(replica.stages)),
            micro_batches=counts[r] if counts else replica.micro_batches,
        )
        for r, replica in enumerate(plan.replicas)
    )
    return replace(plan, replicas=tuple(replicas))


def with_options(plan: Plan, options: Mapping[Place, MemoryOption]) -> Plan:
    """Return the plan with these memory options; stages without one stay as they are."""

    def with_option(place: Place, stage: Stage) -> Stage:
        if place not in options:
            return stage
        mode, offload = options[place]
        return replace(stage, recompute=mode, offload=offload or None)

    return with_stages(plan, with_option)


def with_members(plan: Plan, change: Callable[[Member], Member]) -> Plan:
    """Return the plan with every member changed."""

    def in_stage(_place: Place, stage: Stage) -> Stage:
        return replace(stage, domains=tuple(domain.with_members(change) for domain in stage.domains))

    return with_stages(plan, in_stage)


def written_out(plan: Plan, job: Job, counts: Sequence[int] | None = None) -> tuple[Plan, Job]:
    """Return the same layout with `layers` and recomputation in each stage, and the job of that plan.

    Args:
        counts: micro-batches of each replica; ``None``: those that the plan states.
    """
    if domain_rows(plan)[0].layers is not None:
        return plan, job
    stages: list[list[Stage]] = [[] for _ in plan.replicas]
    for row in domain_rows(plan, job.micro_batch_size, job.pipeline_parallel, job.model.layers):
        domain = row.domain.with_members(partial(_in_stage, row))
        stages[row.replica].append(
            Stage((domain,), layers=row.layers, recompute=job.recompute, exchange=row.exchange)
        )
    taken = [replica.micro_batches for replica in plan.replicas] if counts is None else counts
    replicas = tuple(Replica(tuple(own), count) for own, count in zip(stages, taken, strict=True))
    return replace(plan, replicas=replicas), replace(
        job, pipeline_parallel=1, virtual_stages=1, recompute="none"
    )


def _in_stage(row: DomainRow, member: Member) -> Member:
    """Return the member of a repeated stage as it is in one of the stages."""
    ranks = tuple(rank + row.first_rank for rank in member.ranks)
    return replace(member, ranks=ranks, patches=member.patches if row.stage == 0 else None)


def plan_of_whole(plan: Plan, cluster: Cluster, left_out: Collection[int]) -> Plan:
    """Return a plan of some nodes with its GPUs numbered as in the whole cluster.

    Args:
        plan: a plan for `cluster.without(left_out)`.
    """
    numbers = [rank.rank for rank in cluster.ranks if rank.node not in left_out]
    made = plan.provenance and replace(plan.provenance, cluster_digest=cluster_digest(cluster))
    return replace(plan, gpus=tuple(numbers[gpu] for gpu in rank_gpus(plan, len(numbers))), provenance=made)
