"""The part of a session for stages that differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_hexi.megatron.session import GivenPlan, Session, local_shard
from megatron_hexi.megatron.stages.communicator import BorderChannels
from megatron_hexi.megatron.stages.experts import ExpertsView, make_experts_view
from megatron_hexi.megatron.stages.mesh_groups import MeshGroups, RankView, make_view, set_megatron_groups
from megatron_hexi.mesh import Mesh
from megatron_hexi.plan import Plan, Schedules
from megatron_hexi.plan.units import Unit
from megatron_hexi.runtime import DomainAttention
from megatron_hexi.runtime.wire import connect


@dataclass(frozen=True)
class StagesSession:
    """A rank's mesh, groups and channels.

    Args:
        groups: the process groups made so far; groups of weights' holders are added when the model is built.
        experts: experts of this rank; ``None``: the model has none.
        micro_batch: the group of this stage's ranks, if further tokens are predicted and domains share the
            samples of a micro-batch; else ``None``.
    """

    mesh: Mesh
    groups: MeshGroups
    view: RankView
    channels: BorderChannels
    experts: ExpertsView | None = None
    micro_batch: dist.ProcessGroup | None = None


def start_stages_session(
    given: GivenPlan,
    mesh: Mesh,
    groups: MeshGroups,
    device: torch.device,
) -> Session:
    """Make all groups, replace Megatron's by this rank's, derive its tables, and return its session.

    All ranks of the job must call it, in place of Megatron's own function.
    """
    terms, view = given.terms, make_view(mesh, groups)
    experts_view = None if terms.experts is None else make_experts_view(mesh, groups, terms.experts)
    micro_batch = _counting_group(mesh, groups) if terms.further_layers else None
    cuts_experts = experts_view is not None and experts_view.held.parts > 1
    set_megatron_groups(mesh, view, groups.alone, view.unit if cuts_experts else groups.alone)
    place = view.place
    schedules = schedules_of(mesh, place)
    attention = DomainAttention(
        mesh.plan.workload_of(place.domain),
        schedules,
        view.domain,
        view.a2a,
        window=place.exchange.window,
        kernel_name=given.kernel,
    )
    attention.connect(device)
    # The border on which micro-batches go round is the last of its replica: no rank may wait there first.
    for border in (view.before, view.behind) if place.stage else (view.behind, view.before):
        if border is not None:
            connect(border.forward, device)
            connect(border.backward, device)
    if experts_view is not None:
        for group in (experts_view.dispatch, experts_view.micro_batch, experts_view.sequence):
            connect(group, device)
    if micro_batch is not None:
        connect(micro_batch, device)
    shard = local_shard(schedules(), given.row_multiple, device)
    assert given.shares is not None
    return Session(
        given,
        attention,
        shard,
        given.shares[place.replica],
        StagesSession(
            mesh,
            groups,
            view,
            BorderChannels(mesh, view, device, terms.has_documents),
            experts_view,
            micro_batch,
        ),
        replica=place.replica,
    )


def schedules_of(mesh: Mesh, place: Unit) -> Schedules:
    """Return the cache of a unit's split tables, which has one for each attention mask."""
    workload = mesh.plan.workload_of(place.domain)
    return Schedules(workload, place.domain, place.member, place.exchange.parts, place.rates)


def stages_under(stages: StagesSession, plan: Plan) -> StagesSession:
    """Return a rank's part in stages under another plan with the same ranks in the same groups."""
    before = stages.mesh
    mesh = Mesh(plan, before.micro_batch_size, before.sequence_parallel, before.fp8_recipe)
    view = replace(stages.view, place=mesh.units[stages.view.rank])
    return replace(stages, mesh=mesh, view=view, channels=stages.channels.under(mesh, view))


def _counting_group(mesh: Mesh, groups: MeshGroups) -> dist.ProcessGroup | None:
    """Make the groups in which domains of a last stage add their counts of tokens; a collective of all.

    Returns:
        The group of this rank; ``None`` where its domain holds whole micro-batches.
    """
    own = None
    for rank, unit in enumerate(mesh.units):
        ranks = mesh.micro_batch_ranks(rank)
        domain = {rank for member in unit.domain.members for rank in member.ranks}
        if unit.is_last and set(ranks) != domain:
            own = groups.of(ranks, "MICRO_BATCH") or own
    return own
