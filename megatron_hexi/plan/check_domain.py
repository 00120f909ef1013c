"""Check a domain: positions, tokens and heads of its groups, its share of the batch, and its experts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NoReturn

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.model import Domain, Group, Member, Plan, Range, Replica, Stage
from megatron_hexi.plan.units import HeldExperts, expert_domains
from megatron_hexi.plan.workload import Workload
from megatron_hexi.yaml_file import Place
from megatron_hexi.yaml_schema import Where


def check_domain(workload: Workload, domain: Domain, place: Place, where: Where) -> None:
    """Check the positions, tokens and heads of a domain whose units have been checked."""
    width = len(domain.members[0].ranks)
    for g, group in enumerate(domain.groups):
        _check_group(replace(workload, tensor_parallel=width), group, (*place, g), where)
    _check_partition(
        [
            (segment, (*place, g, "segments", i))
            for g, group in enumerate(domain.groups)
            for i, segment in enumerate(group.segments)
        ],
        workload.seq_length,
        ("position", "group", "seq_length"),
        place,
        where,
    )


def _check_group(workload: Workload, group: Group, place: Place, where: Where) -> None:
    for i, segment in enumerate(group.segments):
        check_range(segment, workload.seq_length, "seq_length", (*place, "segments", i), where)
    for i, (before, after) in enumerate(itertools.pairwise(group.segments), start=1):
        if after[0] < before[1]:
            refuse(
                where,
                (*place, "segments", i),
                f"{list(after)} does not come after {list(before)}",
                "list the segments in ascending order, without overlap",
            )
    tokens = sum(member.tokens for member in group.members)
    if tokens != group.tokens:
        refuse(
            where,
            (*place, "members"),
            f"hold {tokens} tokens together, the group's segments {group.tokens}",
            "make the two equal",
        )
    heads = "heads" if workload.tensor_parallel == 1 else "heads / tensor_parallel"
    for m, member in enumerate(group.members):
        check_range(member.heads, workload.local_heads, heads, (*place, "members", m, "heads"), where)
    _check_partition(
        [(member.heads, (*place, "members", m, "heads")) for m, member in enumerate(group.members)],
        workload.local_heads,
        ("head", "member", heads),
        (*place, "members"),
        where,
    )


def check_range(span: Range, total: int, name: str, place: Place, where: Where) -> None:
    """Refuse a range that runs backwards or ends after `total`; the error message calls `total` by `name`."""
    start, stop = span
    if stop < start:
        refuse(where, place, f"[{start}, {stop}] runs backwards", "write [start, stop] with start <= stop")
    if stop > total:
        refuse(where, place, f"[{start}, {stop}] ends after {name} = {total}", f"end it at {total} at most")


def _check_partition(
    ranges: list[tuple[Range, Place]], total: int, words: tuple[str, str, str], place: Place, where: Where
) -> None:
    """Check that ranges cover [0, total) without overlap."""
    thing, owner, name = words
    reached = 0
    for (start, stop), here in sorted(item for item in ranges if item[0][0] < item[0][1]):
        if start > reached:
            break
        if start < reached:
            refuse(
                where,
                here,
                f"[{start}, {stop}] holds {thing} {start}, which another {owner} holds already",
                f"give every {thing} to one {owner}",
            )
        reached = stop
    if reached != total:
        refuse(
            where,
            place,
            f"leave {thing} {reached} to no {owner}",
            f"let the {owner}s cover [0, {total}), which is {name}",
        )


def refuse(where: Where, place: Place, problem: str, remedy: str) -> NoReturn:
    """Raise a `PlanError` with a place in the plan, the problem and its remedy."""
    raise PlanError(f"{where(place)} {problem}; {remedy}")


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
            _check_experts_partition(stage, held, workload.experts, places, where)


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


def _check_experts_partition(
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
