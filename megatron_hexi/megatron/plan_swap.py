"""From a session to that of another plan with the same ranks in the same groups; no weight moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.session import Session, local_shard
from megatron_hexi.plan import Plan, Schedules, plan_digest


def swapped_session(session: Session, plan: Plan, iteration: int) -> Session:
    """The session of another plan with the same ranks in the same groups.

    Args:
        session: under way.
        plan: the other plan.
        iteration: the first under it.

    Raises:
        PlanError: the plan has other groups, another model, or other shares of the batch.
    """
    old = session.given.plan
    if grouping(plan) != grouping(old) or plan.workload != old.workload:
        raise PlanError(
            f"{session.given.path}: the plan to swap to has other groups or another workload; start the job "
            "again with it"
        )
    attention, domain = session.attention, plan.replicas[session.replica].domain
    index = dist.get_rank(attention.domain_group)
    schedules = Schedules(plan.workload, domain, index, plan.exchange.parts, session.given.rates)
    given = replace(session.given, plan=plan, digest=plan_digest(plan))
    return replace(
        session,
        given=given,
        attention=replace(attention, schedules=schedules, window=plan.exchange.window),
        shard=local_shard(schedules(), given.row_multiple, session.shard.positions.device),
        since=iteration,
    )


def grouping(plan: Plan) -> list[tuple[Any, ...]]:
    """What must stay in a swap: who is in which group of which replica, and the replicas' shares."""
    return [
        (
            replica.micro_batches,
            frozenset(frozenset(m.ranks for m in group.members) for group in replica.domain.groups),
        )
        for replica in plan.replicas
    ]


def forget_positions() -> None:
    """Drop what Megatron keeps of the old positions: rotary embeddings."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
