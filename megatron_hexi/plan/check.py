"""The rules that a plan keeps, each with an error that names the place and the remedy."""

from __future__ import annotations

import itertools
from typing import NoReturn

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.model import Domain, Group, Plan, Range, Workload
from megatron_hexi.yaml_file import Place
from megatron_hexi.yaml_schema import Where


def check_plan(plan: Plan, where: Where) -> None:
    """Check every rule.

    Args:
        plan: the plan; its values already have the right types.
        where: spells a place for an error.

    Raises:
        PlanError: the first rule broken, with place, value and remedy.
    """
    _check_workload(plan.workload, where)
    if not plan.replicas:
        _refuse(where, ("replicas",), "is empty", "give at least one replica")
    seen: dict[int, Place] = {}
    for r, replica in enumerate(plan.replicas):
        place: Place = ("replicas", r, "stages")
        if len(replica.stages) != 1:
            _refuse(
                where,
                place,
                f"has {len(replica.stages)} stages",
                "give one, which all pipeline stages repeat: uneven stages are not supported yet",
            )
        stage = replica.stages[0]
        if stage.layers is not None and stage.layers != plan.workload.layers:
            _refuse(
                where,
                (*place, 0, "layers"),
                f"is {stage.layers}, the model has {plan.workload.layers}",
                "leave it null: uneven stages are not supported yet",
            )
        _check_domain(plan.workload, stage.domain, (*place, 0, "domain", "groups"), seen, where)
    ranks = sorted(seen)
    if ranks != list(range(len(ranks))):
        missing = next(rank for rank in range(len(ranks)) if rank not in seen)
        _refuse(
            where,
            ("replicas",),
            f"have {len(ranks)} members with ranks up to {ranks[-1]}, and rank {missing} is missing",
            f"number them 0 to {len(ranks) - 1}",
        )
    if plan.gpus is not None:
        _check_gpus(plan.gpus, len(ranks) * plan.workload.tensor_parallel, where)


def _check_gpus(gpus: tuple[int, ...], stage: int, where: Where) -> None:
    """A GPU for each rank of the job; stages of a pipeline repeat the members, so any multiple will do."""
    if not gpus or len(gpus) % stage:
        _refuse(
            where,
            ("gpus",),
            f"names {len(gpus)} GPUs, the plan has {stage} a pipeline stage",
            "name one for each rank of the job, or leave it out to use all of the cluster in order",
        )
    first: dict[int, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu in first:
            _refuse(
                where,
                ("gpus", rank),
                f"is {gpu}, which rank {first[gpu]} has already",
                "give every rank a GPU of its own",
            )
        first[gpu] = rank


def _check_workload(workload: Workload, where: Where) -> None:
    heads, kv_heads, tp = workload.heads, workload.kv_heads, workload.tensor_parallel
    if heads % kv_heads:
        _refuse(
            where,
            ("workload", "kv_heads"),
            f"is {kv_heads}, which does not divide the {heads} heads",
            "give a number that divides them",
        )
    if heads % tp:
        _refuse(
            where,
            ("workload", "tensor_parallel"),
            f"is {tp}, which does not divide the {heads} heads",
            "give a number that divides them",
        )
    if kv_heads % tp and tp % kv_heads:
        _refuse(
            where,
            ("workload", "tensor_parallel"),
            f"is {tp}, which neither divides the {kv_heads} KV heads nor is a multiple of them",
            "give a number that does",
        )


def _check_domain(
    workload: Workload, domain: Domain, place: Place, seen: dict[int, Place], where: Where
) -> None:
    if not domain.groups:
        _refuse(where, place, "is empty", "give at least one group")
    for g, group in enumerate(domain.groups):
        _check_group(workload, group, (*place, g), seen, where)
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


def _check_group(
    workload: Workload, group: Group, place: Place, seen: dict[int, Place], where: Where
) -> None:
    if not group.members:
        _refuse(where, (*place, "members"), "is empty", "give at least one member, or drop the group")
    for i, segment in enumerate(group.segments):
        _check_range(segment, workload.seq_length, "seq_length", (*place, "segments", i), where)
    for i, (before, after) in enumerate(itertools.pairwise(group.segments), start=1):
        if after[0] < before[1]:
            _refuse(
                where,
                (*place, "segments", i),
                f"{list(after)} does not come after {list(before)}",
                "list the segments in ascending order, without overlap",
            )
    _check_ranks(group, place, seen, where)
    tokens = sum(member.tokens for member in group.members)
    if tokens != group.tokens:
        _refuse(
            where,
            (*place, "members"),
            f"hold {tokens} tokens together, the group's segments {group.tokens}",
            "make the two equal",
        )
    heads = "heads" if workload.tensor_parallel == 1 else "heads / tensor_parallel"
    for m, member in enumerate(group.members):
        _check_range(member.heads, workload.local_heads, heads, (*place, "members", m, "heads"), where)
    _check_partition(
        [(member.heads, (*place, "members", m, "heads")) for m, member in enumerate(group.members)],
        workload.local_heads,
        ("head", "member", heads),
        (*place, "members"),
        where,
    )


def _check_ranks(group: Group, place: Place, seen: dict[int, Place], where: Where) -> None:
    previous = -1
    for m, member in enumerate(group.members):
        here = (*place, "members", m, "rank")
        if member.rank in seen:
            _refuse(
                where,
                here,
                f"is {member.rank}, which is given already at {where(seen[member.rank])}",
                "give every rank one place",
            )
        if member.rank < previous:
            _refuse(
                where,
                here,
                f"is {member.rank}, after {previous}",
                "list a group's members in ascending rank order",
            )
        seen[member.rank] = here
        previous = member.rank


def _check_range(span: Range, total: int, name: str, place: Place, where: Where) -> None:
    start, stop = span
    if stop < start:
        _refuse(where, place, f"[{start}, {stop}] runs backwards", "write [start, stop] with start <= stop")
    if stop > total:
        _refuse(where, place, f"[{start}, {stop}] ends after {name} = {total}", f"end it at {total} at most")


def _check_partition(
    ranges: list[tuple[Range, Place]], total: int, words: tuple[str, str, str], place: Place, where: Where
) -> None:
    """Ranges that are in order by themselves must cover [0, total), everything once."""
    thing, owner, name = words
    reached = 0
    for (start, stop), here in sorted(item for item in ranges if item[0][0] < item[0][1]):
        if start > reached:
            break
        if start < reached:
            _refuse(
                where,
                here,
                f"[{start}, {stop}] holds {thing} {start}, which another {owner} holds already",
                f"give every {thing} to one {owner}",
            )
        reached = stop
    if reached != total:
        _refuse(
            where,
            place,
            f"leave {thing} {reached} to no {owner}",
            f"let the {owner}s cover [0, {total}), which is {name}",
        )


def _refuse(where: Where, place: Place, problem: str, remedy: str) -> NoReturn:
    raise PlanError(f"{where(place)} {problem}; {remedy}")
