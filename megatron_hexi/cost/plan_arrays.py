"""A plan as arrays: tokens, heads and groups of all units, for cost terms of thousands of units at once.

Units are numbered by their ranks, groups through all replicas in the plan's order. In a plan that gives
stages their layers, the arrays are those of some domains (sections.py), and each counts as a replica here.
Shape letters: U units, N groups, J segments of a group (the largest number of any group; groups with fewer
have empty ones at the end).
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
    """Groups and heads of all units, which are computed once for all plans that differ in tokens only.

    Args:
        heads: number of query heads (of one tensor-parallel rank) of each unit, [U].
        heads_first: number of query heads in the first half, whose block of the own group the backward pass
            computes before the exchange, [U]; all heads if there are neither an exchange nor halves.
        in_halves: whether all-to-alls are cut in two halves of the heads, of which these come first.
        kv: number of KV heads that each unit's query heads read, [U].
        part_heads: number of query heads of each unit in each of the F parts of the first exchange step,
            [F, U].
        part_kv: number of KV heads that these read, [F, U].
        group: number of each unit's group, [U].
        slots: numbers of the units, ordered by group and by position in it, [U].
        first_slot: index in `slots` of each group's first unit, and at the end U, [N + 1].
        replica: number of each group's replica, [N].
        unit_replica: number of each unit's replica, [U].
        first_group: number of the first group of each group's replica, [N].
        groups_beside: number of groups in each group's replica, itself included, [N].
        head_class: number of each group's head class, [N]: groups of a class have the same head ranges in the
            same order.
        head_ranges: query heads of each member of a group, for each head class.
        queries_per_kv: number of query heads that share a KV head.
        all_to_all_pairs: units i and j of all pairs of different units in a group where j computes heads for
            tokens that i holds, two arrays, [pairs] each.
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
        """Messages of keys between groups of any two head classes."""
        return serving(self.head_ranges, self.queries_per_kv)


@dataclass(frozen=True, eq=False)
class PlanArrays(Grouping):
    """A plan as arrays: groups, heads, tokens and positions.

    Args:
        grouping: the groups and heads, one object for all plans that differ in tokens only.
        causal: whether a token sees earlier tokens only.
        tokens: number of tokens of each unit's shard (T), [U].
        group_tokens: number of tokens of each group (G), [N].
        starts: first position of each segment, [N, J].
        stops: position after the last of each segment, [N, J].
    """

    grouping: Grouping
    causal: bool
    tokens: Ints
    group_tokens: Ints
    starts: Ints
    stops: Ints


def domain_arrays(workload: Workload, domains: Sequence[Domain], parts: int) -> PlanArrays:
    """Return the arrays of some domains, each of which counts as a replica.

    Args:
        workload: the plan's workload, with the tensor-parallel size of these domains.
        parts: largest number of parts of the first exchange step.
    """
    groups = [group for domain in domains for group in domain.groups]
    # Stages that are alike have one grouping: of ranks only the order counts.
    leads = sorted(member.lead for group in groups for member in group.members)
    place = {lead: number for number, lead in enumerate(leads)}
    held = tuple(tuple((place[m.lead], m.heads, m.tokens > 0) for m in group.members) for group in groups)
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
    """Return the grouping; `groups` has each member's place by rank, query heads, and whether tokens > 0.

    `counts` is the number of groups of each domain, `ratio` the number of query heads that share a KV head.
    """
    slots = np.array([place for members in groups for place, _, _ in members])
    sizes = [len(members) for members in groups]
    held, group = np.zeros((3 + 2 * parts, len(slots)), dtype=np.int64), np.zeros_like(slots)
    held[:, slots] = np.array([_held(heads, ratio, parts) for members in groups for _, heads, _ in members]).T
    group[slots] = np.repeat(np.arange(len(groups)), sizes)
    heads, first, kv = held[:3]
    replica, beside = np.repeat(np.arange(len(counts)), counts), np.repeat(counts, counts)
    has_tokens = np.zeros(len(slots), dtype=bool)
    has_tokens[slots] = [tokens for members in groups for *_, tokens in members]
    # A group of one member or without tokens has no all-to-all, hence no halves.
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
    """Return pairs of units that send to each other by all-to-all, for `Grouping.all_to_all_pairs`."""
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
    """Return a member's numbers of query heads, of those in the first half, and of KV heads.

    Query heads in each part of the first exchange step follow, then KV heads in each part.
    """
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
