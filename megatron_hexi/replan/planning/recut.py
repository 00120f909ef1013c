"""New tokens, heads, samples and micro-batches for a plan, with the same ranks in the same groups.

Weights are replicated over a domain, over the domains of a stage and over replicas, so none moves. Which
ranks form a group stays, and with it the process groups. The planner balances the present plan.
Samples and micro-batches are dealt by what one takes where they are now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan, Stage, assign_micro_batches
from megatron_hexi.plan.units import domain_rows, unit_rows
from megatron_hexi.planner.layouts.deal import assign_heads
from megatron_hexi.replan.planning.stage_cut import cut_domain


def recut(plan: Plan, job: Job, cluster: Cluster, shares: bool = False) -> Plan:
    """Return the plan with the best tokens, heads, segments and samples found for its groups on a cluster."""
    model = CostModel(job, cluster)

    def order(candidate: Plan) -> tuple[float, float]:
        timing = model.timing(candidate)
        return max(0.0, timing.fullness - 1), timing.phases.total

    best = min(plan, _cut(plan, job, cluster), key=order)
    for changed in _dealt_again(best, job, model, shares):
        best = min(best, _cut(changed, job, cluster), key=order)
    return best


def _dealt_again(plan: Plan, job: Job, model: CostModel, shares: bool) -> Iterator[Plan]:
    """Yield the plan with samples, with micro-batches and with both dealt by speed, where that changes it."""
    busy = {cost.rank: cost.compute_s + cost.communication_s for cost in model.estimate(plan).ranks}
    sampled = _samples_dealt(plan, job, busy)
    if sampled != plan:
        yield sampled
    if shares and len(plan.replicas) > 1:
        for start in {id(one): one for one in (plan, sampled)}.values():
            moved = _micro_batches_dealt(start, job, busy)
            if moved != start:
                yield moved


def _samples_dealt(plan: Plan, job: Job, busy: dict[int, float]) -> Plan:
    """Return the plan with the samples of each stage dealt to its domains by the seconds that one takes."""

    def dealt(stage: Stage) -> Stage:
        samples = [domain.samples for domain in stage.domains]
        if len(samples) == 1 or None in samples:
            return stage
        seconds = [
            max(busy[rank] for member in domain.members for rank in member.ranks) / (domain.samples or 1)
            for domain in stage.domains
        ]
        counts = _deal(job.micro_batch_size, seconds)
        domains = (replace(own, samples=count) for own, count in zip(stage.domains, counts, strict=True))
        return replace(stage, domains=tuple(domains))

    replicas = (replace(one, stages=tuple(map(dealt, one.stages))) for one in plan.replicas)
    return replace(plan, replicas=tuple(replicas))


def _micro_batches_dealt(plan: Plan, job: Job, busy: dict[int, float]) -> Plan:
    """Return the plan with micro-batches dealt to replicas by the seconds of one on the slowest rank."""
    present = _micro_batches(plan, job)
    slowest = [0.0] * len(present)
    for unit in unit_rows(plan, job.micro_batch_size, job.pipeline_parallel):
        slowest[unit.replica] = max(slowest[unit.replica], *(busy[rank] for rank in unit.ranks))
    counts = _deal(sum(present), [seconds / n for seconds, n in zip(slowest, present, strict=True)])
    if counts == present:
        return plan
    replicas = [replace(replica, micro_batches=n) for replica, n in zip(plan.replicas, counts, strict=True)]
    return replace(plan, replicas=tuple(replicas))


def _deal(total: int, seconds: Sequence[float]) -> list[int]:
    """Return the number of things for each, at least one, such that the largest number x seconds is least."""
    counts = list(assign_heads(total, list(seconds)))
    while min(counts) == 0:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


def _micro_batches(plan: Plan, job: Job) -> list[int]:
    """Return the number of micro-batches that each replica takes."""
    shares = assign_micro_batches(plan, job.global_batch_size, job.micro_batch_size)
    return [share.count for share in shares]


def _cut(plan: Plan, job: Job, cluster: Cluster) -> Plan:
    """Return the plan with each domain cut again."""
    counts = _micro_batches(plan, job)
    rows = domain_rows(plan, job.micro_batch_size)
    domains = {
        (row.replica, row.stage, row.number): cut_domain(row, plan, counts[row.replica], job, cluster)
        for row in rows
    }

    def cut(place: tuple[int, int], stage: Stage) -> Stage:
        return replace(
            stage, domains=tuple(domains[(*place, number)] for number in range(len(stage.domains)))
        )

    replicas = tuple(
        replace(replica, stages=tuple(cut((number, s), stage) for s, stage in enumerate(replica.stages)))
        for number, replica in enumerate(plan.replicas)
    )
    return replace(plan, replicas=replicas, estimate=None)
