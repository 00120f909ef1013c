"""New tokens, heads and segments for the domains of one stage, with the same ranks in the same groups."""

from __future__ import annotations

from dataclasses import replace

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost import ceiling_tokens_per_s
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.models import Job
from megatron_hexi.models.job import layers_again, recompute_mode
from megatron_hexi.plan import Domain, Plan
from megatron_hexi.plan.units import DomainRow, rank_gpus
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet, FleetUnit, UnitKind
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout, build_domain
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.search.balance import balance
from megatron_hexi.planner.search.polish import polish

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
        recompute = job.recompute if row.recompute is None else row.recompute
        part = ModelPart(
            layers=stop - first,
            again=layers_again(stop - first, recompute),
            is_first=row.stage == 0,
            is_last=row.is_last,
            ahead=row.depth - row.stage,
            ranges=((first, stop),),
        )
        job = replace(job, tensor_parallel=row.width, recompute=recompute_mode(recompute))
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
