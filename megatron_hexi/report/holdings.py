"""Who holds what: a plan turned round, one row a unit. Tables, pictures and JSON are made from it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.plan import Plan, Traffic, backward_traffic, build_schedule, forward_traffic
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.terms import Offload, Recompute
from megatron_hexi.plan.units import Unit, unit_rows

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
    return [_holding(plan, number, unit) for number, unit in enumerate(unit_rows(plan))]


def _holding(plan: Plan, number: int, unit: Unit) -> Holding:
    workload = plan.workload_of(unit.domain)
    schedule = build_schedule(workload, unit.domain, unit.member, unit.exchange.parts)
    counted = (schedule, workload.head_dim, BATCH, ELEMENT_BYTES, workload.value_dim)
    return Holding(
        rank=number,
        ranks=unit.ranks,
        replica=unit.replica,
        stage=unit.stage,
        layers=unit.layers,
        ministages=unit.ministages,
        offload=unit.offload or None,
        recompute=unit.recompute,
        domain=unit.number,
        samples=unit.domain.samples,
        micro_batches=unit.domain.micro_batches,
        group=unit.group,
        group_name=unit.domain.groups[unit.group].name,
        tokens=unit.tokens,
        share=unit.tokens / workload.seq_length,
        heads=unit.heads,
        kv_heads=schedule.own_kv,
        segments=schedule.segments,
        state=unit.state,
        experts=unit.domain.members[unit.member].experts,
        forward=forward_traffic(*counted),
        backward=backward_traffic(*counted),
    )
