"""New tokens, heads, samples and micro-batches for a plan, with the same ranks in the same groups.

Weights are replicated over a domain, over the domains of a stage and over replicas, so none moves. Which
ranks form a group stays, and with it the process groups. The planner balances the present plan.
Samples and micro-batches are dealt by what one takes where they are now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost import CostModel, ceiling_tokens_per_s
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.models import Job
from megatron_hexi.plan import Domain, Plan, Stage, assign_micro_batches
from megatron_hexi.plan.recompute import Again, of_layer
from megatron_hexi.plan.units import DomainRow, domain_rows, rank_gpus, unit_rows
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet, FleetUnit, UnitKind
from megatron_hexi.planner.layouts.deal import assign_heads
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout, build_domain
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.search.balance import balance
from megatron_hexi.planner.search.polish import polish


def recut(plan: Plan, job: Job, cluster: Cluster, shares: bool = False) -> Plan:
    """Return the plan with the best tokens, heads, segments and samples found for its groups on a cluster."""
    cluster = _as_stated(plan, job, cluster)
    model = CostModel(job, cluster)

    def order(candidate: Plan) -> tuple[float, float]:
        timing = model.timing(candidate)
        return max(0.0, timing.fullness - 1), timing.phases.total

    best = min(plan, _cut(plan, job, cluster), key=order)
    for changed in _dealt_again(best, job, model, shares):
        best = min(best, _cut(changed, job, cluster), key=order)
    return best


def _as_stated(plan: Plan, job: Job, cluster: Cluster) -> Cluster:
    """Return the cluster without fp8 on the GPUs of units that compute in bf16."""
    gpus, ranks = rank_gpus(plan, len(cluster.ranks)), list(cluster.ranks)
    plain: dict[int, Device] = {}
    for unit in unit_rows(plan, job.micro_batch_size, job.pipeline_parallel):
        for gpu in (gpus[rank] for rank in unit.ranks if unit.precision == "bf16"):
            device = ranks[gpu].device
            ranks[gpu] = replace(ranks[gpu], device=plain.setdefault(id(device), device.without_fp8))
    return replace(cluster, ranks=tuple(ranks)) if plain else cluster


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


_ROUNDS = 6
#: Layouts that polishing may time.
_BUDGET = 40
#: In ministages, or with offload, a stage's memory is not that of a whole stage in 1F1B, so a cut is not held
#: against it here: the plan as a whole is, in the end.
_ROOMIER = 4.0


def cut_domain(row: DomainRow, plan: Plan, micro_batches: int, job: Job, cluster: Cluster) -> Domain:
    """Return a domain with the best tokens, heads and segments found for its groups."""
    domain = row.domain
    if len(domain.members) == 1:
        return domain
    micro_batches = micro_batches if row.micro_batches is None else len(row.micro_batches)
    if row.ministages is not None or row.offload:
        cluster = cluster.with_memory_margin(1 - _ROOMIER)
    fleet, shards = _fleet(row, plan, micro_batches, job, cluster), plan.units
    if row.layers is not None:  # as if other replicas held these layers likewise
        shards = len(plan.replicas) * len(plan.replicas[row.replica].stages[row.stage].members)
    judge, window = Judge(fleet, shards), row.exchange.window
    trial = judge.try_out(fleet, [_layout(domain, micro_batches)], window)
    trial = balance(judge, Rates(fleet, window, shards, micro_batches), trial, _ROUNDS)
    trial = polish(judge, trial, _BUDGET)
    ranks = {unit: member.ranks for unit, member in enumerate(domain.members)}
    gpus = {
        rank: gpu
        for unit, own in ranks.items()
        for rank, gpu in zip(own, fleet.units[unit].gpus[0], strict=True)
    }
    return _with_names(build_domain(fleet, trial.layouts[0], ranks, gpus), domain)


def _with_names(cut: Domain, domain: Domain) -> Domain:
    """Return a domain that was cut again with all that a cut does not change."""
    names = {frozenset(m.lead for m in group.members): group.name for group in domain.groups}
    before = {member.lead: member for member in domain.members}
    groups = tuple(
        replace(
            group,
            name=names[frozenset(m.lead for m in group.members)],
            members=tuple(replace(before[m.lead], tokens=m.tokens, heads=m.heads) for m in group.members),
        )
        for group in cut.groups
    )
    return replace(domain, groups=groups)


def _fleet(row: DomainRow, plan: Plan, micro_batches: int, job: Job, cluster: Cluster) -> Fleet:
    """Return the domain's members as the planner's units, in the order of their ranks."""
    part: ModelPart | None = None
    samples, job = job.micro_batch_size, replace(job, data_parallel=1)
    if row.layers is not None:
        first, stop = row.layers
        samples = row.samples[1] - row.samples[0]
        recompute = row.recompute or job.recompute
        part = ModelPart(
            layers=stop - first,
            again=Again.of(recompute).layers(stop - first),
            is_first=row.stage == 0,
            is_last=row.is_last,
            ahead=row.depth - row.stage,
            ranges=((first, stop),),
        )
        job = replace(job, tensor_parallel=row.width, recompute=of_layer(recompute))
    job = replace(job, micro_batch_size=samples, global_batch_size=micro_batches * samples)
    gpus = rank_gpus(plan, len(cluster.ranks))
    devices: dict[tuple[int, ...], tuple[int, tuple[Device, ...]]] = {}
    units = []

    def rate(device: Device) -> float:
        return ceiling_tokens_per_s(job, [device])

    for site, member in enumerate(row.domain.members):
        stages = range(job.pipeline_parallel)
        stack = tuple(tuple(gpus[s * plan.ranks + rank] for rank in member.ranks) for s in stages)
        # A unit waits for its slowest GPU.
        key = tuple(min((cluster.ranks[gpu].device for gpu in part), key=rate) for part in stack)
        place = devices.setdefault(tuple(map(id, key)), (len(devices), key))[0]
        units.append(FleetUnit(stack, place, site))
    size = job.tensor_parallel * job.pipeline_parallel
    kinds = tuple(UnitKind(key, min(map(rate, key)) * size) for _, key in devices.values())
    return Fleet(cluster, job, kinds, tuple(units), part)


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
