"""Megatron's pipeline of alike stages, written as a plan whose stages have layers of their own."""

from __future__ import annotations

from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.plan import Domain, Plan, Replica, Stage
from megatron_hexi.plan.units import domain_rows
from megatron_hexi.planner.joint import Candidate


def written_out(found: Candidate, cluster: Cluster) -> Candidate:
    """The same layout with `layers` in each stage, which is all that multi-token prediction trains in.

    Args:
        found: a plan whose one stage the job repeats, or another, which stays as it is.
        cluster: where it runs.
    """
    plan, job = found.plan, found.job
    if not plan.is_repeated or job.pipeline_parallel == 1:
        return found
    stages: list[list[Stage]] = [[] for _ in plan.replicas]
    for row in domain_rows(plan, job.micro_batch_size, job.pipeline_parallel, job.model.layers):
        domain = _from_rank(row.domain, row.first_rank)
        stages[row.replica].append(Stage((domain,), row.layers, job.recompute, row.exchange))
    replicas = tuple(
        Replica(tuple(own), replica.micro_batches) for own, replica in zip(stages, plan.replicas, strict=True)
    )
    workload = replace(plan.workload, tensor_parallel=job.tensor_parallel)
    whole = Plan(workload, replicas, gpus=plan.gpus)
    alone = replace(job, pipeline_parallel=1, recompute="none")
    return Candidate(whole, alone, CostModel(alone, cluster).timing(whole))


def _from_rank(domain: Domain, first: int) -> Domain:
    """The domain on ranks so many further on."""
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
