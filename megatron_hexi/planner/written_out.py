"""A plan whose one stage the job repeats, written with layers in each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_hexi.models import Job
from megatron_hexi.plan import Domain, Plan, Replica, Stage
from megatron_hexi.plan.units import domain_rows


def written_out(plan: Plan, job: Job, counts: Sequence[int] | None = None) -> tuple[Plan, Job]:
    """Return the same layout with `layers` and recomputation in each stage, and the job of that plan.

    Args:
        counts: micro-batches of each replica; ``None``: those that the plan states.
    """
    if domain_rows(plan)[0].layers is not None:
        return plan, job
    stages: list[list[Stage]] = [[] for _ in plan.replicas]
    for row in domain_rows(plan, job.micro_batch_size, job.pipeline_parallel, job.model.layers):
        domain = _from_rank(row.domain, row.first_rank)
        stages[row.replica].append(
            Stage((domain,), layers=row.layers, recompute=job.recompute, exchange=row.exchange)
        )
    taken = [replica.micro_batches for replica in plan.replicas] if counts is None else counts
    replicas = tuple(Replica(tuple(own), count) for own, count in zip(stages, taken, strict=True))
    return replace(plan, replicas=replicas), replace(job, pipeline_parallel=1, recompute="none")


def _from_rank(domain: Domain, first: int) -> Domain:
    """Return the domain with `first` added to all of its ranks."""
    groups = (
        replace(
            group,
            members=tuple(
                replace(member, ranks=tuple(rank + first for rank in member.ranks))
                for member in group.members
            ),
        )
        for group in domain.groups
    )
    return replace(domain, groups=tuple(groups))
