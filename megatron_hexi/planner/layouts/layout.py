"""Layouts of domains during a search: units in groups, with their tokens and heads.

A layout says nothing of positions and ranks; `build_plan` derives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.models import Job
from megatron_hexi.plan import Domain, Exchange, Group, Member, Plan, Replica, Stage, Workload, unit_ranks
from megatron_hexi.plan.layout import apportion, causal_segments, consecutive, full_segments
from megatron_hexi.plan.proportion import worthwhile_parts
from megatron_hexi.planner.expert_placement import spread_experts
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.deal import assign_tokens
from megatron_hexi.planner.layouts.images import divided_images

#: Units of each group, the outermost group first.
Grouping = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class A2AGroup:
    """An all-to-all group.

    Args:
        units: its members, as numbers in the fleet, in the order of their heads.
        heads: query heads (of one tensor-parallel rank) of each member.
    """

    units: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: tuple[int, ...]

    @property
    def total(self) -> int:
        """Tokens of the group."""
        return sum(self.tokens)

    def reordered(self, places: Iterable[int]) -> A2AGroup:
        """Return the group with members in this order, each with its tokens and heads."""
        order = list(places)
        fields = (self.units, self.tokens, self.heads)
        return A2AGroup(*(tuple(field[place] for place in order) for field in fields))


@dataclass(frozen=True)
class Layout:
    """The layout of one domain.

    Args:
        parts: its groups, the outermost of the nested zigzag first.
        micro_batches: micro-batches that its replica processes in an iteration.
    """

    parts: tuple[A2AGroup, ...]
    micro_batches: int

    def with_tokens(self, tokens: int, weights: Sequence[float]) -> Layout:
        """Return the layout with tokens divided among groups by `weights`, inside groups as before."""
        parts = [
            replace(part, tokens=assign_tokens(total, np.array(part.tokens, dtype=float) + 1e-9))
            for part, total in zip(self.parts, assign_tokens(tokens, np.array(weights)), strict=True)
        ]
        return replace(self, parts=tuple(parts))

    def in_steps(self, step: int) -> Layout:
        """Return the layout with tokens in multiples of `step`; the remainder goes to the largest unit."""
        held = [tokens for part in self.parts for tokens in part.tokens]
        total = sum(held)
        if step == 1 or total < step or all(tokens % step == 0 for tokens in held):
            return self
        dealt = [step * steps for steps in apportion(total // step, held)]
        dealt[dealt.index(max(dealt))] += total % step
        left = iter(dealt)
        parts = (replace(part, tokens=tuple(next(left) for _ in part.tokens)) for part in self.parts)
        return replace(self, parts=tuple(parts))


def build_plan(fleet: Fleet, layouts: Sequence[Layout], window: int) -> Plan:
    """Build a plan from one layout per replica; `window` is the prefetch depth of the exchange, in steps.

    Ranks are numbered by the cluster file, so a plan for all of a cluster needs no `Plan.gpus`.
    """
    workload = fleet.job.workload()
    used = units_by_rank(fleet, layouts)
    rank = {unit: number for number, unit in enumerate(used)}
    gpus = fleet.gpus(used)
    ranks = {unit: unit_ranks(workload, number) for unit, number in rank.items()}
    gpu = dict(zip((each for unit in used for each in ranks[unit]), gpus, strict=False))
    replicas = tuple(
        Replica((Stage((build_domain(fleet, layout, ranks, gpu),)),), layout.micro_batches)
        for layout in layouts
    )
    return Plan(
        workload=with_experts(workload, fleet.job),
        replicas=replicas,
        exchange=Exchange(window, worthwhile_parts(replicas)),
        gpus=None if gpus == tuple(range(len(fleet.cluster.ranks))) else gpus,
    )


def units_by_rank(fleet: Fleet, layouts: Sequence[Layout]) -> list[int]:
    """Return the units that layouts use, in the order of the plan's ranks, that of the cluster file."""
    units = [unit for layout in layouts for part in layout.parts for unit in part.units]
    return sorted(units, key=lambda unit: fleet.units[unit].gpus[0][0])


def with_experts(workload: Workload, job: Job) -> Workload:
    """Return a plan's workload, with the number of experts of a layer if the job's model has experts."""
    return replace(workload, experts=job.model.expert_count)


def build_domain(
    fleet: Fleet, layout: Layout, ranks: Mapping[int, tuple[int, ...]], gpu: Mapping[int, int] | Sequence[int]
) -> Domain:
    """Build the domain of a layout."""
    workload = fleet.job.workload()
    segments = (causal_segments if workload.causal else full_segments)([part.total for part in layout.parts])
    groups = []
    for part, held in zip(layout.parts, segments, strict=True):
        # Heads go by the order of the group's units, whatever their ranks: units at the same place in groups
        # that are alike have the same heads, so keys and values travel between counterparts.
        given = zip(part.units, part.tokens, consecutive(part.heads), strict=True)
        members = sorted(
            (Member(ranks[unit], tokens, heads) for unit, tokens, heads in given),
            key=lambda member: member.lead,
        )
        groups.append(Group(held, tuple(members), name=_name(fleet, part)))
    domain = Domain(tuple(groups))
    for experts in fleet.job.model.routed:
        (domain,) = spread_experts(
            [domain], experts.count, fleet.experts.domain_size, lambda rank: fleet.expert_weight(gpu[rank])
        )
    if fleet.part is None or fleet.part.is_first:
        domain = divided_images(domain, fleet.job, fleet.cluster, lambda rank: fleet.cluster.ranks[gpu[rank]])
    return domain


def _name(fleet: Fleet, part: A2AGroup) -> str:
    """Return a group's name in print: ``h100-0``, ``h100-0 + a100-0``, or ``h100-0 and 3 more nodes``."""
    cluster = fleet.cluster
    nodes = list(dict.fromkeys(cluster.ranks[fleet.units[unit].gpus[0][0]].node for unit in part.units))
    names = [cluster.nodes[node].name for node in nodes]
    if len(part.units) == 1:
        return cluster.rank_name(fleet.units[part.units[0]].gpus[0][0])
    return " + ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more nodes"
