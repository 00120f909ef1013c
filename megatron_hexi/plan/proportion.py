"""Make a plan that gives each rank tokens and heads in proportion to its speed.

Memory and links are ignored: the plan is one that could be written by hand, and a baseline for the planner.

`exchange.parts` is the number of messages that carry the keys of the first exchange step. With more parts,
more of the transfer is hidden. But each part needs a kernel call over fewer heads, and a call that leaves
most of a GPU idle costs more time than it hides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.layout import apportion, causal_segments, consecutive, full_segments
from megatron_hexi.plan.model import Domain, Exchange, Group, Member, Plan, Replica, Stage
from megatron_hexi.plan.units import unit_ranks
from megatron_hexi.plan.workload import Workload

#: Largest number of parts. With four, three are hidden behind the part before; more parts hide hardly more.
MOST_PARTS = 4
#: Smallest queries x heads of a kernel call that keeps a GPU busy: two rounds of tiles on the 132
#: multiprocessors of an H100. A tile is 128 queries of one head (FlashAttention-3, arXiv 2407.08608).
BUSY_ROWS = 2 * 132 * 128


def worthwhile_parts(replicas: Sequence[Replica]) -> int:
    """Return the largest number of parts with which every kernel call of a group's busiest unit fills a GPU.

    The other units of the group have less work and wait for the busiest unit anyway.
    """
    rows = [
        group.tokens * max(member.heads[1] - member.heads[0] for member in group.members)
        for replica in replicas
        for group in replica.domain.groups
        if group.tokens and (len(replica.domain.groups) > 1 or len(group.members) > 1)
    ]
    return max(1, min([MOST_PARTS, *(rows_of_group // BUSY_ROWS for rows_of_group in rows)])) if rows else 1


_FASTEST = 1e100


def proportional_domain(workload: Workload, speeds: Sequence[Sequence[float]], first_unit: int = 0) -> Domain:
    """Return a domain whose groups and members have work in proportion to their speeds.

    Args:
        speeds: for each group, the relative speed of each of its members; units are numbered in this order.

    Raises:
        PlanError: there is no group, a group has no members, or a speed is not positive or far too large.
    """
    if not speeds or not all(speeds):
        raise PlanError(f"speeds {list(map(list, speeds))}: give at least one rank in every group")
    check_speeds(speeds, "speeds")
    group_tokens = apportion(workload.seq_length, [sum(group) for group in speeds])
    segments = (causal_segments if workload.causal else full_segments)(group_tokens)
    groups = []
    unit = first_unit
    for number, group in enumerate(speeds):
        tokens = apportion(group_tokens[number], group)
        heads = consecutive(apportion(workload.local_heads, group))
        members = tuple(
            Member(unit_ranks(workload, unit + i), tokens[i], heads[i]) for i in range(len(group))
        )
        unit += len(group)
        groups.append(Group(segments[number], members, name=f"group-{number}"))
    return Domain(tuple(groups))


def check_speeds(speeds: Sequence[Sequence[float]], given: str) -> None:
    """Refuse a speed that is not positive, or far too large.

    Raises:
        PlanError: a speed is refused; the message has its number, counted from 1 over all groups.
    """
    for number, speed in enumerate(itertools.chain.from_iterable(speeds), 1):
        if not speed > 0:
            raise PlanError(
                f"{given}: speed number {number} is {speed:g}; write one above 0, or leave a rank "
                "without work out"
            )
        if speed > _FASTEST:  # sums and products with tokens stay finite
            raise PlanError(
                f"{given}: speed number {number} is {speed:g}, too large; speeds are relative: the most is "
                f"{_FASTEST:g}"
            )


def proportional_plan(
    workload: Workload, replicas: Sequence[Sequence[Sequence[float]]], window: int = 1
) -> Plan:
    """Return a plan with one domain per replica, whose units have work in proportion to their speeds.

    Args:
        replicas: relative speed of each member of each group of each replica.
        window: prefetch depth of the exchange of keys and values, in steps.

    Raises:
        PlanError: the speeds of a replica are refused by `proportional_domain`.
    """
    built = []
    first_unit = 0
    for speeds in replicas:
        domain = proportional_domain(workload, speeds, first_unit)
        first_unit += len(domain.members)
        built.append(Replica((Stage((domain,)),)))
    return Plan(workload, tuple(built), Exchange(window, worthwhile_parts(built)))
