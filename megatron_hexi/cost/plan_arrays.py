"""A plan as arrays: what every unit holds, for terms that are counted for thousands of units at once.

Units are numbered by their ranks, groups through all replicas in the plan's order. Where stages have layers
of their own, the arrays are those of some domains (sections.py), and each domain is a replica here. Shape
letters: U units, N groups, J segments of a group (the most that any has; shorter ones are filled with empty
ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_hexi.cost.arrays import Ints
from megatron_hexi.cost.serving import Serving, serving
from megatron_hexi.plan import Domain, Plan, Workload, require_repeated
from megatron_hexi.plan.heads import head_parts, heads_first, kv_range
from megatron_hexi.plan.layout import merge_segments
from megatron_hexi.plan.model import Group, Range


@dataclass(frozen=True, eq=False)
class PlanArrays:
    """What a plan says.

    Args:
        causal: whether a token sees earlier tokens only.
        tokens: T of each unit.
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
        group_tokens: G of each group.
        replica: replica of each group.
        first_group: first group of each group's replica.
        groups_beside: groups of its replica, itself included.
        starts: first position of each segment, [N, J].
        stops: position after the last, [N, J].
        head_class: groups with the same head ranges in the same order have the same number.
        head_ranges: of each such class, the query heads of its members.
        queries_per_kv: query heads that share a KV head.
    """

    causal: bool
    tokens: Ints
    heads: Ints
    heads_first: Ints
    in_halves: bool
    kv: Ints
    part_heads: Ints
    part_kv: Ints
    group: Ints
    slots: Ints
    first_slot: Ints
    group_tokens: Ints
    replica: Ints
    first_group: Ints
    groups_beside: Ints
    starts: Ints
    stops: Ints
    head_class: Ints
    head_ranges: tuple[tuple[Range, ...], ...]
    queries_per_kv: int

    @cached_property
    def unit_replica(self) -> Ints:
        """Replica of each unit."""
        return self.replica[self.group]

    @cached_property
    def all_to_all_pairs(self) -> tuple[Ints, Ints]:
        """Units i and j of one group where j has heads: j computes them for i's tokens."""
        sizes = np.diff(self.first_slot)
        group = np.repeat(np.arange(len(sizes)), sizes)
        takers = self.slots[self.heads[self.slots] > 0]
        counts = np.bincount(self.group[takers], minlength=len(sizes))
        # Each slot's unit with all takers of its group: first, first + 1, ...
        repeats = counts[group]
        ends = np.cumsum(repeats)
        holder = np.repeat(self.slots, repeats)
        begin = np.repeat((np.cumsum(counts) - counts)[group] - (ends - repeats), repeats)
        taker = takers[begin + np.arange(len(holder))]
        apart = (holder != taker) & (self.tokens[holder] > 0)
        return holder[apart], taker[apart]

    @cached_property
    def serving(self) -> Serving:
        """Who serves whom between groups of two head classes."""
        return serving(self.head_ranges, self.queries_per_kv)


def plan_arrays(plan: Plan) -> PlanArrays:
    """The arrays of all units of a plan whose one stage the job repeats.

    Raises:
        PlanError: it has more to it than domains that hold all samples.
    """
    require_repeated(plan, "time")
    return domain_arrays(plan.workload, [replica.domain for replica in plan.replicas], plan.exchange.parts)


def domain_arrays(workload: Workload, domains: Sequence[Domain], parts: int) -> PlanArrays:
    """The arrays of some domains, each a replica of them.

    Args:
        workload: theirs, with their tensor-parallel size.
        domains: the domains.
        parts: of the first exchange step, at most.
    """
    groups = [group for domain in domains for group in domain.groups]
    counts = [len(domain.groups) for domain in domains]
    ratio = workload.queries_per_kv
    beside = np.repeat(counts, counts)
    leads = [member.lead for group in groups for member in group.members]
    number = {lead: place for place, lead in enumerate(sorted(leads))}
    tokens, group_of = (np.zeros(len(leads), dtype=np.int64) for _ in range(2))
    held = np.zeros((3 + 2 * parts, len(leads)), dtype=np.int64)
    for place, group in enumerate(groups):
        ranks = [number[member.lead] for member in group.members]
        tokens[ranks] = [member.tokens for member in group.members]
        held[:, ranks] = np.array([_held(member.heads, ratio, parts) for member in group.members]).T
        group_of[ranks] = place
    heads, first, kv = held[:3]
    part_heads, part_kv = held[3 : 3 + parts], held[3 + parts :]
    in_halves = parts > 1
    several = np.array([len(group.members) > 1 and group.tokens > 0 for group in groups])
    classes: dict[tuple[Range, ...], int] = {}
    head_class = [classes.setdefault(tuple(m.heads for m in group.members), len(classes)) for group in groups]
    starts, stops = _segments(groups)
    return PlanArrays(
        causal=workload.causal,
        tokens=tokens,
        heads=heads,
        heads_first=np.where((beside[group_of] > 1) | (in_halves & several[group_of]), first, heads),
        in_halves=in_halves,
        kv=kv,
        part_heads=part_heads,
        part_kv=part_kv,
        group=group_of,
        slots=np.array([number[lead] for lead in leads]),
        first_slot=np.cumsum([0, *(len(group.members) for group in groups)]),
        group_tokens=np.array([group.tokens for group in groups]),
        replica=np.repeat(np.arange(len(counts)), counts),
        first_group=np.repeat(np.cumsum([0, *counts[:-1]]), counts),
        groups_beside=beside,
        starts=starts,
        stops=stops,
        head_class=np.array(head_class),
        head_ranges=tuple(classes),
        queries_per_kv=ratio,
    )


@lru_cache(maxsize=4096)  # a search asks for few ranges, over and over
def _held(heads: Range, ratio: int, parts: int) -> tuple[int, ...]:
    """Of a member: query heads, those that come first, KV heads; query heads by part, KV heads by part."""
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
