"""The rules that a plan keeps, each with an error that names the place and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.model import Domain, Group, Plan, Range, Workload

#: A place in the plan: ("replicas", 0, "stages", 0, …).
Place = tuple[str | int, ...]
#: Turns a place into text; files put their name and line in front.
Where = Callable[[Place], str]


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
                "give one: Megatron repeats it for every pipeline stage (uneven stages are not supported yet)",
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
            f"uses {len(ranks)} ranks up to {ranks[-1]} but not rank {missing}",
            f"number the members 0 to {len(ranks) - 1}",
        )


def _check_workload(workload: Workload, where: Where) -> None:
    heads, kv_heads, tp = workload.heads, workload.kv_heads, workload.tensor_parallel
    if heads % kv_heads:
        _refuse(
            where,
            ("workload", "kv_heads"),
            f"is {kv_heads}, which does not divide the {heads} heads",
            "give a divisor of heads",
        )
    if heads % tp:
        _refuse(
            where,
            ("workload", "tensor_parallel"),
            f"is {tp}, which does not divide the {heads} heads",
            "give a divisor of heads",
        )
    if kv_heads % tp and tp % kv_heads:
        _refuse(
            where,
            ("workload", "tensor_parallel"),
            f"is {tp}, which neither divides nor is a multiple of the {kv_heads} KV heads",
            "give one that does",
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
        "position",
        "seq_length",
        place,
        where,
    )


def _check_group(workload: Workload, group: Group, place: Place, seen: dict[int, Place], where: Where) -> None:
    if not group.members:
        _refuse(where, (*place, "members"), "is empty", "give at least one member, or drop the group")
    for i, (before, after) in enumerate(zip(group.segments, group.segments[1:], strict=False)):
        if after[0] < before[1]:
            _refuse(
                where,
                (*place, "segments", i + 1),
                f"{list(after)} does not come after {list(before)}",
                "list the segments in ascending order, without overlap",
            )
    previous = -1
    for m, member in enumerate(group.members):
        here = (*place, "members", m, "rank")
        if member.rank in seen:
            _refuse(
                where,
                here,
                f"{member.rank} is a member already, of {where(seen[member.rank][:-3])}",
                "give every rank one place",
            )
        if member.rank < previous:
            _refuse(
                where,
                here,
                f"{member.rank} comes after {previous}",
                "list a group's members in ascending rank order",
            )
        seen[member.rank] = here
        previous = member.rank
    tokens = sum(member.tokens for member in group.members)
    if tokens != group.tokens:
        _refuse(
            where,
            (*place, "members"),
            f"hold {tokens} tokens, the group's segments {group.tokens}",
            "make the two equal",
        )
    _check_partition(
        [(member.heads, (*place, "members", m, "heads")) for m, member in enumerate(group.members)],
        workload.local_heads,
        "head",
        "heads" if workload.tensor_parallel == 1 else "heads / tensor_parallel",
        (*place, "members"),
        where,
    )


def _check_partition(
    ranges: list[tuple[Range, Place]], total: int, thing: str, name: str, place: Place, where: Where
) -> None:
    for (start, stop), here in ranges:
        if stop < start:
            _refuse(where, here, f"[{start}, {stop}] runs backwards", "write [start, stop] with start <= stop")
        if stop > total:
            _refuse(where, here, f"[{start}, {stop}] ends after {name} = {total}", f"end it at {total} at most")
    reached = 0
    for (start, stop), here in sorted(item for item in ranges if item[0][0] < item[0][1]):
        if start > reached:
            break
        if start < reached:
            _refuse(where, here, f"[{start}, {stop}] holds {thing} {start} again", f"give every {thing} to one only")
        reached = stop
    if reached != total:
        _refuse(where, place, f"leaves {thing} {reached} to nobody", f"cover [0, {total}), which is {name}")


def _refuse(where: Where, place: Place, problem: str, remedy: str) -> NoReturn:
    raise PlanError(f"{where(place)} {problem}; {remedy}")
