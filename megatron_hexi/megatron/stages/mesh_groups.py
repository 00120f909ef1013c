"""Process groups where stages differ: Megatron's groups as each rank needs them.

Megatron's groups are rows of one rectangle of ranks. Here every rank has groups of its own: its unit for
tensor parallelism, its domain for context parallelism, a rank of each stage for the pipeline. Rows over
borders, gradients and the loss have further groups, made by all ranks of the job in one order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_hexi.megatron.process_groups import GroupOptions
from megatron_hexi.mesh import Mesh
from megatron_hexi.plan.units import Unit


class PipelineView(dist.ProcessGroup):
    """The pipeline of one rank: a rank of each stage, itself at its own stage.

    Megatron reads its size and ranks. They differ between ranks of a stage, so nothing can be sent on it.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        super().__init__(list(ranks).index(rank), len(ranks))  # type: ignore[call-arg]
        # torch.distributed looks up the ranks of a group here.
        dist.distributed_c10d._world.pg_group_ranks[self] = {member: i for i, member in enumerate(ranks)}

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "a collective on Megatron's pipeline group: under a plan whose stages differ, the ranks of a "
            "pipeline are joined by the plan's tables only"
        )

    allreduce = allreduce_coalesced = allgather = allgather_coalesced = _refuse
    allgather_into_tensor_coalesced = _allgather_base = _reduce_scatter_base = reduce_scatter = _refuse
    broadcast = reduce = gather = scatter = alltoall = alltoall_base = barrier = _refuse
    send = recv = recv_anysource = _refuse


@dataclass
class MeshGroups:
    """The process groups of a job, each made once, by all ranks in one order."""

    rank: int
    options: GroupOptions

    def __post_init__(self) -> None:
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}
        self.alone = self.options.make([self.rank], "HEXI_RANK_GROUP")

    def of(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup | None:
        """Return a group of ranks; ``None`` on other ranks. All ranks of the job must call it."""
        key = name, tuple(ranks)
        if len(key[1]) == 1:
            return self.alone if self.rank in key[1] else None
        if key not in self._made:
            self._made[key] = self.options.make_by_all(list(ranks), f"HEXI_{name}_GROUP")
        return self._made[key]


@dataclass(frozen=True)
class BorderGroups:
    """The groups of one border, one for each direction."""

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclass(frozen=True)
class RankView:
    """The groups of one rank.

    Args:
        a2a: the ranks of its A2A group.
        loss: one rank of each unit that computes the loss; this rank alone if it is not among them.
        before: groups of the border to the stage before; with ministages, the last stage is before the first.
            ``None``: there is no such border.
        behind: groups of the border to the stage behind, likewise.
    """

    rank: int
    place: Unit
    unit: dist.ProcessGroup
    domain: dist.ProcessGroup
    a2a: dist.ProcessGroup
    loss: dist.ProcessGroup
    before: BorderGroups | None
    behind: BorderGroups | None
    world: dist.ProcessGroup


def make_view(mesh: Mesh, groups: MeshGroups) -> RankView:
    """Make all groups of the plan, and return this rank's; all ranks of the job must call it."""
    world = groups.of(range(len(mesh.units)), "JOB")
    loss = groups.of(mesh.loss_ranks(), "LOSS")
    unit = domain = a2a = None
    for rank, rank_unit in enumerate(mesh.units):
        unit = groups.of(rank_unit.ranks, "UNIT") or unit
        domain = groups.of(mesh.context_ranks(rank), "DOMAIN") or domain
        a2a = groups.of(a2a_ranks(mesh, rank), "A2A") or a2a
    borders: list[BorderGroups | None] = [None, None]
    for number, replica in enumerate(mesh.plan.replicas):
        depth = len(replica.stages)
        for stage in range(1, depth + mesh.wraps_around(number)):
            sides = [mesh.stage_ranks(number, side % depth) for side in (stage - 1, stage)]
            ranks = sorted(sides[0] + sides[1])
            turn = "ROUND_" if stage == depth else ""  # two stages have two borders between them
            forward, backward = groups.of(ranks, f"{turn}FORWARD"), groups.of(ranks, f"{turn}BACKWARD")
            for side in (0, 1):
                if groups.rank in sides[side]:
                    assert forward is not None
                    assert backward is not None
                    borders[1 - side] = BorderGroups(forward, backward)
    assert unit is not None
    assert domain is not None
    assert a2a is not None
    assert world is not None
    rank_unit = mesh.units[groups.rank]
    before, behind = borders
    return RankView(groups.rank, rank_unit, unit, domain, a2a, loss or groups.alone, before, behind, world)


def a2a_ranks(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the ranks of a rank's A2A group: its counterpart in each unit, in the order of the domain."""
    unit = mesh.units[rank]
    index = unit.ranks.index(rank)
    return tuple(sorted(member.ranks[index] for member in unit.domain.groups[unit.group].members))


def set_megatron_groups(
    mesh: Mesh, view: RankView, alone: dist.ProcessGroup, expert_slices: dist.ProcessGroup
) -> None:
    """Replace Megatron's groups by those of a rank.

    Args:
        expert_slices: the ranks that divide this rank's experts between them.
    """
    from megatron.core import parallel_state

    rank = view.rank
    pipeline = mesh.pipeline_ranks(rank)
    ends = {pipeline[0], pipeline[-1]}
    by_name: dict[str, Any] = {
        "TENSOR_MODEL_PARALLEL_GROUP": view.unit,
        "TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": list(view.place.ranks),
        "EXPERT_TENSOR_PARALLEL_GROUP": expert_slices,
        "PIPELINE_MODEL_PARALLEL_GROUP": PipelineView(pipeline, rank),
        "PIPELINE_GLOBAL_RANKS": list(pipeline),
        "CONTEXT_PARALLEL_GROUP": view.domain,
        "CONTEXT_PARALLEL_GLOBAL_RANKS": dist.get_process_group_ranks(view.domain),
        # Gradient norms and skipped steps concern all ranks.
        "MODEL_PARALLEL_GROUP": view.world,
        "MODEL_PARALLEL_GLOBAL_RANKS": list(range(len(mesh.units))),
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": view.world,
        # Tied embeddings are pieces that the first and the last stages hold.
        "EMBEDDING_GROUP": alone if rank in ends else None,
        "EMBEDDING_GLOBAL_RANKS": sorted(ends),
        "POSITION_EMBEDDING_GROUP": alone if rank == pipeline[0] else None,
        "POSITION_EMBEDDING_GLOBAL_RANKS": [pipeline[0]],
        # A rank loads whole sequences of its replica's micro-batches.
        "DATA_PARALLEL_GLOBAL_RANKS": [rank],
        "DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": dist.get_process_group_ranks(view.loss),
        "EXPERT_MODEL_PARALLEL_RANKS": [rank],
        "GTP_WEIGHT_REMAT_GLOBAL_RANKS": [rank],
        "EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS": [rank],
    }
    for variable in vars(parallel_state):
        name = variable.removeprefix("_")
        if not re.fullmatch(r"_[A-Z_]+", variable):
            continue
        if name in by_name:
            setattr(parallel_state, variable, by_name[name])
        elif re.search(r"(?<!EXPERT_)DATA_PARALLEL_GROUP_WITH_CP", name) and "TENSOR" not in name:
            setattr(parallel_state, variable, view.loss)
        elif re.match(r"(EXPERT_)?TENSOR_", name) and "GROUP" in name:
            setattr(parallel_state, variable, view.unit)
        elif "_GROUP" in name and not re.search(r"HIERARCHICAL|HYBRID|INTER_PARTIAL|GROUPS", name):
            setattr(parallel_state, variable, alone)
    parallel_state._set_global_memory_buffer()
