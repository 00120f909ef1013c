"""Who holds what: a plan turned round, one row a unit. Tables, pictures and JSON are made from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hexi.plan import Plan, Replica, Traffic, backward_traffic, build_schedule, forward_traffic
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.terms import Offload, Recompute

#: What the traffic is counted for: one sequence in bf16.
BATCH = 1
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Holding:
    """What one unit holds, and what a rank of it sends in one attention layer for one sequence in bf16.

    Args:
        rank: its number among the units of the plan.
        ranks: its ranks.
        replica: index of its replica.
        stage: index of its stage in the replica.
        layers: the layers of the stage; ``None``: all, and the job's pipeline repeats it.
        ministages: the layers of each of its ministages; ``None``: it runs whole.
        offload: what of the stage waits in host memory; ``None``: nothing.
        recompute: what the stage computes again; ``None``: as the job says.
        domain: index of its domain in the stage.
        samples: of each micro-batch, what the domain takes; ``None``: all.
        micro_batches: of an iteration, the whole ones that the domain takes; ``None``: all.
        group: index of its group in the domain.
        group_name: the group's name; may be empty.
        tokens: size of its shard.
        share: part of the sequence that this is, from 0 to 1.
        heads: its query heads in attention.
        kv_heads: the KV heads that these read.
        segments: positions of the sequence that it holds.
        state: its share of the optimizer's state, relative to others.
        experts: the ranges that its ranks hold, or the one that they cut; ``None``: all, cut.
        forward: what it sends in the forward pass.
        backward: what it sends in the backward pass.
    """

    rank: int
    ranks: tuple[int, ...]
    replica: int
    stage: int
    layers: Range | None
    ministages: tuple[Range, ...] | None
    offload: tuple[Offload, ...] | None
    recompute: Recompute | None
    domain: int
    samples: int | None
    micro_batches: int | None
    group: int
    group_name: str
    tokens: int
    share: float
    heads: Range
    kv_heads: Range
    segments: tuple[Range, ...]
    state: int
    experts: tuple[Range, ...] | None
    forward: Traffic
    backward: Traffic

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Replica, stage, domain and group: what members of one group have in common."""
        return (self.replica, self.stage, self.domain, self.group)


def holdings(plan: Plan) -> list[Holding]:
    """One row for each unit of a plan that passed its checks, ascending."""
    number = {member.lead: number for number, member in enumerate(plan.members)}
    rows = (
        row
        for r, replica in enumerate(plan.replicas)
        for s in range(len(replica.stages))
        for row in _stage_holdings(plan, number, replica, (r, s))
    )
    return sorted(rows, key=lambda row: row.rank)


def _stage_holdings(
    plan: Plan, number: dict[int, int], replica: Replica, place: tuple[int, int]
) -> Iterator[Holding]:
    stage = replica.stages[place[1]]
    exchange = stage.exchange or plan.exchange
    for d, domain in enumerate(stage.domains):
        workload = plan.workload_of(domain)
        group_of = {member.lead: g for g, group in enumerate(domain.groups) for member in group.members}
        for index, member in enumerate(domain.members):
            schedule = build_schedule(workload, domain, index, exchange.parts)
            group = group_of[member.lead]
            counted = (schedule, workload.head_dim, BATCH, ELEMENT_BYTES, workload.value_dim)
            yield Holding(
                rank=number[member.lead],
                ranks=member.ranks,
                replica=place[0],
                stage=place[1],
                layers=stage.layers,
                ministages=None if stage.ministages is None else replica.ministage_layers(place[1]),
                offload=stage.offload,
                recompute=stage.recompute,
                domain=d,
                samples=domain.samples,
                micro_batches=domain.micro_batches,
                group=group,
                group_name=domain.groups[group].name,
                tokens=member.tokens,
                share=member.tokens / workload.seq_length,
                heads=member.heads,
                kv_heads=schedule.own_kv,
                segments=schedule.segments,
                state=member.state,
                experts=member.experts,
                forward=forward_traffic(*counted),
                backward=backward_traffic(*counted),
            )
