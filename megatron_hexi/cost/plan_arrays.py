"""A plan as arrays: what every unit holds, for terms that are counted for thousands of units at once.

Units are numbered by their ranks, groups through all replicas in the plan's order. Where stages have layers
of their own, the arrays are those of some domains (sections.py), and each domain is a replica here. Shape
letters: U units, N groups, J segments of a group (the most that any has; shorter ones are filled with empty
ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_hexi.cost.arrays import Bools, Ints
from megatron_hexi.cost.serving import Serving, serving
from megatron_hexi.plan import Domain, Workload
from megatron_hexi.plan.heads import head_parts, heads_first, kv_range
from megatron_hexi.plan.layout import merge_segments
from megatron_hexi.plan.model import Group, Range


@dataclass(frozen=True, eq=False)
class Grouping:
    """Groups and heads of all units: they stay when tokens move, and are worked out once.

    Args:
        heads: query heads (of one tensor-parallel rank) of each unit.
        heads_first: those of them whose own block the backward pass computes before the exchange; all of
            them where there is no exchange and no half.
        in_halves: whether the all-to-alls travel in two, these heads first.
        kv: KV heads that these read.
        part_heads: query heads of each unit in each part of the first exchange step, [F, U].
        part_kv: KV heads that these read, [F, U].
        group: group of each unit.
        slots: units by group and position in it.
        first_slot: where each group's units begin in `slots`, [N + 1].
        replica: replica of each group.
        unit_replica: replica of each unit.
        first_group: first group of each group's replica.
        groups_beside: groups of its replica, itself included.
        head_class: groups with the same head ranges in the same order have the same number.
        head_ranges: of each such class, the query heads of its members.
        queries_per_kv: query heads that share a KV head.
        all_to_all_pairs: units i and j of one group where i has tokens and j heads: j computes i's.
    """

    heads: Ints
    heads_first: Ints
    in_halves: bool
    kv: Ints
    part_heads: Ints
    part_kv: Ints
    group: Ints
    slots: Ints
    first_slot: Ints
    replica: Ints
    unit_replica: Ints
    first_group: Ints
    groups_beside: Ints
    head_class: Ints
    head_ranges: tuple[tuple[Range, ...], ...]
    queries_per_kv: int
    all_to_all_pairs: tuple[Ints, Ints]

    @property
    def serving(self) -> Serving:
        """Owners and users of keys between groups of two head classes."""
        return serving(self.head_ranges, self.queries_per_kv)


@dataclass(frozen=True, eq=False)
class PlanArrays(Grouping):
    """A plan as arrays.

    Args:
        grouping: that of all plans that differ in tokens only.
        causal: whether a token sees earlier tokens only.
        tokens: T of each unit.
        group_tokens: G of each group.
        starts: first position of each segment, [N, J].
        stops: position after the last, [N, J].
    """

    grouping: Grouping
    causal: bool
    tokens: Ints
    group_tokens: Ints
    starts: Ints
    stops: Ints


def domain_arrays(workload: Workload, domains: Sequence[Domain], parts: int) -> PlanArrays:
    """The arrays of some domains, each a replica of them.

    Args:
        workload: theirs, with their tensor-parallel size.
        domains: the domains.
        parts: of the first exchange step, at most.
    """
    groups = [group for domain in domains for group in domain.groups]
    held = tuple(tuple((m.lead, m.heads, m.tokens > 0) for m in group.members) for group in groups)
    counts = tuple(len(domain.groups) for domain in domains)
    grouping = _grouping(held, counts, workload.queries_per_kv, parts)
    tokens = np.zeros(len(grouping.slots), dtype=np.int64)
    tokens[grouping.slots] = [member.tokens for group in groups for member in group.members]
    starts, stops = _segments(groups)
    return PlanArrays(
        **vars(grouping),
        grouping=grouping,
        causal=workload.causal,
        tokens=tokens,
        group_tokens=(stops - starts).sum(axis=1),
        starts=starts,
        stops=stops,
    )


@lru_cache(maxsize=64)  # a search moves tokens more often than heads
def _grouping(
    groups: tuple[tuple[tuple[int, Range, bool], ...], ...], counts: tuple[int, ...], ratio: int, parts: int
) -> Grouping:
    """Grouping of members given by first rank, query heads and whether they have tokens."""
    leads = [lead for members in groups for lead, _, _ in members]
    number = {lead: place for place, lead in enumerate(sorted(leads))}
    slots = np.array([number[lead] for lead in leads])
    sizes = [len(members) for members in groups]
    held, group = np.zeros((3 + 2 * parts, len(leads)), dtype=np.int64), np.zeros_like(slots)
    held[:, slots] = np.array([_held(heads, ratio, parts) for members in groups for _, heads, _ in members]).T
    group[slots] = np.repeat(np.arange(len(groups)), sizes)
    heads, first, kv = held[:3]
    replica, beside = np.repeat(np.arange(len(counts)), counts), np.repeat(counts, counts)
    has_tokens = np.zeros(len(slots), dtype=bool)
    has_tokens[slots] = [tokens for members in groups for *_, tokens in members]
    # Without tokens or alone, nothing of a group travels in halves.
    moves = [len(members) > 1 and any(tokens for *_, tokens in members) for members in groups]
    classes: dict[tuple[Range, ...], int] = {}
    return Grouping(
        heads=heads,
        heads_first=np.where((beside[group] > 1) | ((parts > 1) & np.array(moves)[group]), first, heads),
        in_halves=parts > 1,
        kv=kv,
        part_heads=held[3 : 3 + parts],
        part_kv=held[3 + parts :],
        group=group,
        slots=slots,
        first_slot=np.cumsum([0, *sizes]),
        replica=replica,
        unit_replica=replica[group],
        first_group=np.repeat(np.cumsum([0, *counts[:-1]]), counts),
        groups_beside=beside,
        head_class=np.array(
            [classes.setdefault(tuple(one for _, one, _ in members), len(classes)) for members in groups]
        ),
        head_ranges=tuple(classes),
        queries_per_kv=ratio,
        all_to_all_pairs=_pairs(heads, has_tokens, group, slots, np.array(sizes)),
    )


def _pairs(heads: Ints, has_tokens: Bools, group: Ints, slots: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """`Grouping.all_to_all_pairs`, of units in groups of these sizes."""
    takers = slots[heads[slots] > 0]
    counts = np.bincount(group[takers], minlength=len(sizes))
    # Each slot's unit with all takers of its group: first, first + 1, ...
    owner = np.repeat(np.arange(len(sizes)), sizes)
    repeats = counts[owner]
    ends = np.cumsum(repeats)
    holder = np.repeat(slots, repeats)
    begin = np.repeat((np.cumsum(counts) - counts)[owner] - (ends - repeats), repeats)
    taker = takers[begin + np.arange(len(holder))]
    apart = (holder != taker) & has_tokens[holder]
    return holder[apart], taker[apart]


@lru_cache(maxsize=4096)  # a search asks for few ranges, over and over
def _held(heads: Range, ratio: int, parts: int) -> tuple[int, ...]:
    """Counts of a member: query heads, those that come first, KV heads; both by part."""
    some = head_parts(heads, ratio, parts)
    none = (0,) * (parts - len(some))
    queries, *each = (stop - start for start, stop in (heads, *some))
    kv, *read = (stop - start for start, stop in (kv_range(one, ratio) for one in (heads, *some)))
    return queries, heads_first(heads, ratio), kv, *each, *none, *read, *none


def _segments(groups: list[Group]) -> tuple[Ints, Ints]:
    merged = [merge_segments(group.segments) for group in groups]
    most = max(1, *(len(segments) for segments in merged)) if merged else 1
    starts, stops = (np.zeros((len(groups), most), dtype=np.int64) for _ in range(2))
    for number, segments in enumerate(merged):
        for place, (start, stop) in enumerate(segments):
            starts[number, place], stops[number, place] = start, stop
    return starts, stops
