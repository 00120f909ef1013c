"""Swap to another plan with the same ranks in the same groups; no weight moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.session import Session, local_shard
from megatron_hexi.megatron.stages.stages_session import schedules_of, stages_under
from megatron_hexi.plan import Plan, Schedules, Share, Stage, assign_micro_batches, plan_digest


def swapped_session(session: Session, plan: Plan, iteration: int) -> Session:
    """Return the session of another plan with the same ranks in the same groups."""
    old, dealt = session.given.plan, session.share is not None
    is_other = plan.workload != old.workload or plan.job.micro_batch_size != old.job.micro_batch_size
    if is_other or grouping(plan, dealt) != grouping(old, dealt):
        raise PlanError(
            f"{session.given.path}: the new plan has other groups or another workload; start the job again "
            "with --hexi-plan and the new plan"
        )
    attention, stages, exchange = session.attention, session.stages, plan.exchange
    if stages is None:
        domain = plan.replicas[session.replica].domain
        index = dist.get_rank(attention.domain_group)
        schedules = Schedules(plan.workload, domain, index, exchange.parts)
    else:
        stages = stages_under(stages, plan)
        schedules, exchange = schedules_of(stages.mesh, stages.view.place), stages.view.place.exchange
    shares, mesh = swapped_shares(session, plan), None if stages is None else stages.mesh
    given = replace(session.given, plan=plan, digest=plan_digest(plan), shares=shares, mesh=mesh)
    return replace(
        session,
        given=given,
        attention=replace(attention, schedules=schedules, window=exchange.window),
        shard=local_shard(schedules(), given.row_multiple, session.shard.positions.device),
        share=shares[session.replica] if shares else None,
        stages=stages,
        since=iteration,
    )


def swapped_shares(session: Session, plan: Plan) -> tuple[Share, ...] | None:
    """Return each replica's share of a global batch under another plan; ``None`` if Megatron assigns it."""
    return None if session.share is None else assign_micro_batches(plan, session.share.total, 1)


def grouping(plan: Plan, dealt: bool) -> list[tuple[Any, ...]]:
    """Return the part of a plan that a swap must not change.

    Args:
        dealt: whether micro-batches are dealt by the plan: then replicas' shares may change.

    Returns:
        Of each replica: its share where that must stay, and the order of its ministages; of each stage its
        layers, how they run, and who is in which group with which weights. Domains that take whole
        micro-batches keep them, and the share.
    """
    return [
        (
            None if dealt and not any(stage.takes_micro_batches for stage in stages) else micro_batches,
            order,
            *map(_grouping_of, stages),
        )
        for stages, micro_batches, order in (
            (replica.stages, replica.micro_batches, replica.order) for replica in plan.replicas
        )
    ]


def _grouping_of(stage: Stage) -> tuple[Any, ...]:
    domains = [
        (
            domain.samples is not None,
            domain.micro_batches,
            frozenset(
                frozenset((m.ranks, m.state, m.experts, m.precision) for m in group.members)
                for group in domain.groups
            ),
        )
        for domain in stage.domains
    ]
    return stage.layers, stage.recompute, stage.ministages, stage.offload, domains


def forget_positions() -> None:
    """Clear Megatron's caches of rotary embeddings, which have the old positions."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
