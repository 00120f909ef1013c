"""Check how a stage divides the batch over its domains, and the experts over its ranks."""

from __future__ import annotations

from megatron_hexi.plan.check_domain import check_range, refuse
from megatron_hexi.plan.experts import HeldExperts, expert_domains
from megatron_hexi.plan.model import Member, Plan, Replica, Stage
from megatron_hexi.plan.workload import Workload
from megatron_hexi.yaml_file import Place
from megatron_hexi.yaml_schema import Where


def check_shares(plan: Plan, replica: Replica, stage: Stage, place: Place, where: Where) -> None:
    """Check how the domains of a stage divide micro-batches."""
    if stage.takes_micro_batches:
        _check_deal(replica, stage, place, where)
    else:
        _check_samples(plan, stage, place, where)


def _check_deal(replica: Replica, stage: Stage, place: Place, where: Where) -> None:
    for d, domain in enumerate(stage.domains):
        here = (*place, d)
        if domain.samples is not None:
            refuse(
                where,
                (*here, "samples"),
                f"is {domain.samples}, in a stage whose domains take whole micro-batches",
                "give every domain samples, or every one micro_batches",
            )
        if domain.micro_batches is None:
            refuse(
                where,
                (*here, "micro_batches"),
                "is missing",
                "say how many each domain takes",
            )
    if stage.ministages is None:
        refuse(
            where,
            (*place, 0, "micro_batches"),
            f"is {stage.domains[0].micro_batches}, in a stage that runs 1F1B, where all take part in each",
            "give the stages of the replica ministages: 1 or more",
        )
    if replica.is_interleaved:
        refuse(
            where,
            (*place, 0, "micro_batches"),
            f"is {stage.domains[0].micro_batches}, in a replica with order: interleaved, where all take part "
            "in each",
            "give samples, or leave out the order",
        )
    total = sum(domain.micro_batches or 0 for domain in stage.domains)
    if replica.micro_batches != total:
        stated = "does not say" if replica.micro_batches is None else f"takes {replica.micro_batches}"
        refuse(
            where,
            place,
            f"take {total} micro-batches of an iteration, the replica {stated}",
            f"give the replica micro_batches: {total}, or the domains other numbers",
        )


def _check_samples(plan: Plan, stage: Stage, place: Place, where: Where) -> None:
    stated = [domain.samples for domain in stage.domains]
    if stated == [None]:
        return
    for d, samples in enumerate(stated):
        if samples is None:
            refuse(
                where, (*place, d, "samples"), "is missing", "say how many of a micro-batch each domain takes"
            )
    size, total = plan.job.micro_batch_size, sum(samples or 0 for samples in stated)
    if size is None:
        refuse(where, ("job", "micro_batch_size"), "is missing, domains share its samples", f"give {total}")
    if total != size:
        refuse(
            where, place, f"take {total} samples of each micro-batch", f"it has {size} (job.micro_batch_size)"
        )


def check_experts(workload: Workload, stage: Stage, place: Place, where: Where) -> None:
    """Check the experts that the units of a stage hold."""
    places: dict[int, Place] = {}
    stated = False
    for d, domain in enumerate(stage.domains):
        for g, group in enumerate(domain.groups):
            for m, member in enumerate(group.members):
                here = (*place, d, "groups", g, "members", m, "experts")
                places |= dict.fromkeys(member.ranks, here)
                if member.experts is not None:
                    stated = True
                    _check_ranges(workload, stage, member, here, where)
    if stated:
        assert workload.experts is not None
        for held in expert_domains(stage, workload.experts):
            _check_partition(stage, held, workload.experts, places, where)


def _check_ranges(workload: Workload, stage: Stage, member: Member, place: Place, where: Where) -> None:
    assert member.experts is not None
    if stage.layers is None:
        refuse(
            where,
            place,
            "is given, in a stage that the job's pipeline repeats",
            "give the stage its layers, or leave it out and give --expert-model-parallel-size",
        )
    if workload.experts is None:
        refuse(where, ("workload", "experts"), "is missing, units hold some", "give --num-experts here")
    width = len(member.ranks)
    if len(member.experts) not in (1, width):
        refuse(
            where,
            place,
            f"has {len(member.experts)} ranges, the unit {width} rank{'s' if width > 1 else ''}",
            "give one range, which the ranks cut between them, or one for each rank",
        )
    for span in member.experts:
        check_range(span, workload.experts, "workload.experts", place, where)


def _check_partition(
    stage: Stage, held: tuple[HeldExperts, ...], total: int, places: dict[int, Place], where: Where
) -> None:
    owners: dict[int, int] = {}
    for one in held:
        for expert in range(*one.experts) if one.part == 0 else ():
            if expert in owners:
                refuse(
                    where,
                    places[one.rank],
                    f"holds expert {expert}, which rank {owners[expert]} of the expert domain holds already",
                    "a domain ends with the unit that completes it: give each of its experts to one unit",
                )
            owners[expert] = one.rank
    missing = next((expert for expert in range(total) if expert not in owners), None)
    if missing is not None:
        ranks = sorted(one.rank for one in held)
        why = ", which takes whole micro-batches by itself," if stage.takes_micro_batches else ""
        refuse(
            where,
            places[held[-1].rank],
            f"leaves expert {missing} to no unit: the expert domain of ranks {ranks}{why} does not hold all "
            f"{total}",
            "give it to one of them",
        )
