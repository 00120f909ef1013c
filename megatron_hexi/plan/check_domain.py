"""Check a domain: groups partition the positions; members partition the tokens and heads of their group."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NoReturn

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.model import Domain, Group, Range
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
