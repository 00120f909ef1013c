"""Who holds what: a plan turned round, one row a rank. Tables, pictures and JSON are made from it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.plan import Plan, Traffic, backward_traffic, build_schedule, forward_traffic
from megatron_hexi.plan.model import Range

#: What the traffic is counted for: one sequence in bf16.
BATCH = 1
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Holding:
    """What one rank holds, and what it sends in one attention layer for one sequence in bf16.

    Args:
        rank: its number in the plan.
        replica: index of its replica.
        group: index of its group in the replica's domain.
        group_name: the group's name; may be empty.
        tokens: size of its shard.
        share: part of the sequence that this is, from 0 to 1.
        heads: its query heads in attention.
        kv_heads: the KV heads that these read.
        segments: positions of the sequence that it holds.
        forward: what it sends in the forward pass.
        backward: what it sends in the backward pass.
    """

    rank: int
    replica: int
    group: int
    group_name: str
    tokens: int
    share: float
    heads: Range
    kv_heads: Range
    segments: tuple[Range, ...]
    forward: Traffic
    backward: Traffic


def holdings(plan: Plan) -> list[Holding]:
    """One row for each rank of a plan that passed its checks, ascending."""
    return sorted(
        (row for replica in range(len(plan.replicas)) for row in _replica_holdings(plan, replica)),
        key=lambda row: row.rank,
    )


def _replica_holdings(plan: Plan, replica: int) -> list[Holding]:
    workload, domain = plan.workload, plan.replicas[replica].domain
    group_of = {member.rank: g for g, group in enumerate(domain.groups) for member in group.members}
    rows = []
    for index, member in enumerate(domain.members):
        schedule = build_schedule(workload, domain, index, plan.exchange.parts)
        group = group_of[member.rank]
        rows.append(
            Holding(
                rank=member.rank,
                replica=replica,
                group=group,
                group_name=domain.groups[group].name,
                tokens=member.tokens,
                share=member.tokens / workload.seq_length,
                heads=member.heads,
                kv_heads=schedule.own_kv,
                segments=schedule.segments,
                forward=forward_traffic(
                    schedule, workload.head_dim, BATCH, ELEMENT_BYTES, workload.value_dim
                ),
                backward=backward_traffic(
                    schedule, workload.head_dim, BATCH, ELEMENT_BYTES, workload.value_dim
                ),
            )
        )
    return rows
