"""New tokens, heads and segments for a plan, with the same ranks in the same groups.

Weights are replicated over a domain, so none moves. Which ranks form a group stays, and with it the process
groups. The planner's balance is asked from the present plan. Where replicas may take other shares of the
batch, micro-batches are dealt by what one takes on each of the replicas that were cut so.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost import CostModel, Job, ceiling_tokens_per_s
from megatron_hexi.plan import Domain, Plan, Replica, Stage
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet, FleetUnit, UnitKind
from megatron_hexi.planner.layouts.deal import assign_heads
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout, build_domain
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.search.balance import balance
from megatron_hexi.planner.search.polish import polish

_ROUNDS = 6
#: Layouts that polishing may time.
_BUDGET = 40


def recut(plan: Plan, job: Job, cluster: Cluster, shares: bool = False) -> Plan:
    """Return the plan with the best tokens, heads and segments found for its groups on this cluster.

    Args:
        plan: a plan whose job repeats its stages.
        job: the plan's job.
        cluster: the cluster at its present speeds.
        shares: whether replicas may take other numbers of micro-batches.
    """
    recut_plan = _cut(plan, job, cluster)
    if not shares or len(plan.replicas) == 1:
        return recut_plan
    reassigned = _dealt_again(recut_plan, job, cluster)
    if reassigned is None:
        return recut_plan
    model, reassigned = CostModel(job, cluster), _cut(reassigned, job, cluster)
    return min(recut_plan, reassigned, key=lambda candidate: model.timing(candidate).phases.total)


def _dealt_again(plan: Plan, job: Job, cluster: Cluster) -> Plan | None:
    """Return the plan with micro-batches assigned by speed; ``None`` if that changes nothing."""
    counts = [replica.micro_batches for replica in plan.replicas]
    present = [count for count in counts if count is not None]
    if len(present) < len(counts):
        present = [job.global_batch_size // job.micro_batch_size // len(counts)] * len(counts)
    replica_of = {
        rank: number
        for number, replica in enumerate(plan.replicas)
        for member in replica.domain.members
        for rank in member.ranks
    }
    busy = [0.0] * len(counts)
    for cost in CostModel(job, cluster).estimate(plan).ranks:
        number = replica_of[cost.rank % plan.ranks]
        busy[number] = max(busy[number], cost.compute_s + cost.communication_s)
    dealt = list(assign_heads(sum(present), [seconds / n for seconds, n in zip(busy, present, strict=True)]))
    while min(dealt) == 0:  # each replica has a part in an iteration
        dealt[dealt.index(max(dealt))] -= 1
        dealt[dealt.index(0)] += 1
    if dealt == present:
        return None
    replicas = [replace(replica, micro_batches=n) for replica, n in zip(plan.replicas, dealt, strict=True)]
    return replace(plan, replicas=tuple(replicas))


def _cut(plan: Plan, job: Job, cluster: Cluster) -> Plan:
    replicas = tuple(
        Replica((_stage(replica.stages[0], plan, number, job, cluster),), replica.micro_batches)
        for number, replica in enumerate(plan.replicas)
    )
    return replace(plan, replicas=replicas, estimate=None)


def _stage(stage: Stage, plan: Plan, number: int, job: Job, cluster: Cluster) -> Stage:
    share = plan.replicas[number].micro_batches
    micro_batches = share or job.global_batch_size // job.micro_batch_size // len(plan.replicas)
    stage_job = replace(job, data_parallel=1, global_batch_size=micro_batches * job.micro_batch_size)
    fleet = _fleet(stage.domain, plan, stage_job, cluster)
    judge = Judge(fleet, plan.units)
    window = plan.exchange.window
    trial = judge.try_out(fleet, [_layout(stage.domain, micro_batches)], window)
    trial = balance(judge, Rates(fleet, window, plan.units, micro_batches), trial, _ROUNDS)
    trial = polish(judge, trial, _BUDGET)
    ranks = {unit: member.ranks for unit, member in enumerate(stage.domain.members)}
    gpus = {
        rank: gpu
        for unit, own in ranks.items()
        for rank, gpu in zip(own, fleet.units[unit].gpus[0], strict=True)
    }
    domain = build_domain(fleet, trial.layouts[0], ranks, gpus)
    names = {frozenset(m.lead for m in group.members): group.name for group in stage.domain.groups}
    groups = tuple(
        replace(group, name=names[frozenset(m.lead for m in group.members)]) for group in domain.groups
    )
    return replace(stage, domains=(replace(stage.domain, groups=groups),))


def _fleet(domain: Domain, plan: Plan, job: Job, cluster: Cluster) -> Fleet:
    """Return the domain's members as the planner's units, in the order of their ranks."""
    gpus = rank_gpus(plan, len(cluster.ranks))
    devices: dict[tuple[int, ...], tuple[int, tuple[Device, ...]]] = {}
    units = []

    def rate(device: Device) -> float:
        return ceiling_tokens_per_s(job, [device])

    for site, member in enumerate(domain.members):
        stages = range(job.pipeline_parallel)
        stack = tuple(tuple(gpus[s * plan.ranks + rank] for rank in member.ranks) for s in stages)
        # A unit waits for its slowest GPU.
        key = tuple(min((cluster.ranks[gpu].device for gpu in part), key=rate) for part in stack)
        place = devices.setdefault(tuple(map(id, key)), (len(devices), key))[0]
        units.append(FleetUnit(stack, place, site))
    size = job.tensor_parallel * job.pipeline_parallel
    kinds = tuple(UnitKind(key, min(map(rate, key)) * size) for _, key in devices.values())
    return Fleet(cluster, job, kinds, tuple(units))


def _layout(domain: Domain, micro_batches: int) -> Layout:
    """Return the domain as the planner's layout: outermost group first, members in order of heads."""
    number = {member.lead: unit for unit, member in enumerate(domain.members)}
    parts = []
    for group in sorted(domain.groups, key=lambda group: (not group.segments, group.segments)):
        members = sorted(group.members, key=lambda member: member.heads)
        parts.append(
            A2AGroup(
                tuple(number[member.lead] for member in members),
                tuple(member.tokens for member in members),
                tuple(member.heads[1] - member.heads[0] for member in members),
            )
        )
    return Layout(tuple(parts), micro_batches)
