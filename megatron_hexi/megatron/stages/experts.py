"""Experts where stages differ: the layer of a rank that holds some of them, or none.

Megatron divides the experts evenly over the ranks of its expert-parallel group, of which a rank here is the
only one; which experts it holds is said by the plan, and tokens reach them by `dispatcher`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.mesh_groups import MeshGroups
from megatron_hexi.mesh import ExpertDomain, Mesh, job_experts
from megatron_hexi.patching import patched
from megatron_hexi.plan.units import HeldExperts


@dataclass(frozen=True)
class ExpertsView:
    """The experts of one rank, and the groups of its layers.

    Args:
        inside: the part of the expert domain on the rank's node, if rows travel once to a node; else all.
        dispatch_inside: the group of these ranks.
    """

    held: HeldExperts
    domain: ExpertDomain
    inside: ExpertDomain
    dispatch: dist.ProcessGroup
    dispatch_inside: dist.ProcessGroup
    micro_batch: dist.ProcessGroup
    sequence: dist.ProcessGroup


def make_experts_view(mesh: Mesh, groups: MeshGroups, total: int) -> ExpertsView:
    """Make the groups of all expert layers, and return this rank's; all ranks of the job must call it."""
    by_rank = job_experts(mesh.plan, total)
    own: dict[str, dist.ProcessGroup] = {}
    for rank, unit in enumerate(mesh.units):
        sequence = tuple(sorted(rank for member in unit.domain.members for rank in member.ranks))
        together = {
            "dispatch": by_rank[rank][0].ranks,
            "dispatch_inside": by_rank[rank][0].beside(rank).ranks,
            "micro_batch": mesh.micro_batch_ranks(rank),
            "sequence": sequence,
        }
        for name, ranks in together.items():
            group = groups.of(ranks, f"EXPERTS_{name.upper()}")
            if group is not None:
                own[name] = group
    domain, held = by_rank[groups.rank]
    return ExpertsView(held, domain, domain.beside(held.rank), **own)


def active_experts() -> ExpertsView | None:
    """Return this rank's experts; ``None`` if Megatron's own groups place them, or the model has none."""
    session = active_session()
    return None if session is None or session.stages is None else session.stages.experts


class NoExperts(torch.nn.Module):
    """The experts of a rank that holds none: it takes part in every exchange of tokens without rows.

    Takes the arguments of Megatron's experts.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, states: Tensor, per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return a tensor without rows, [0, hidden], and no bias.

        The tensor depends on `states` and `probs`, so that this rank takes part in the all-to-alls of both in
        the backward pass, too.
        """
        return states * probs.unsqueeze(-1).to(states.dtype), None

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return an empty state, for want of weights."""
        return {}

    def backward_dw(self) -> None:
        """Do nothing, for want of weights."""


@patched(
    "megatron.core.transformer.moe.moe_layer:BaseMoELayer.__init__",
    why="a rank holds the experts that the plan gives it",
    only=">=0.19",
)
def _with_own_experts(
    original: Callable[..., None],
    self: Any,
    config: Any,
    layer_number: int | None = None,
    pg_collection: Any = None,
    is_mtp_layer: bool = False,
) -> None:
    original(self, config, layer_number, pg_collection, is_mtp_layer)
    view = active_experts()
    if view is not None:
        self.num_local_experts = view.held.count
        self.local_expert_indices = list(range(*view.held.experts))
        if not view.held.count:
            self.submodules = replace(self.submodules, experts=NoExperts)


def _with_global_numbers(
    original: Callable[..., Any],
    self: Any,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: Any = None,
) -> Any:
    tree = original(self, prefix, sharded_offsets, metadata)
    view = active_experts()
    if view is None:
        return tree
    return _renumbered(tree, len(sharded_offsets), view.held.experts[0], self.config.num_moe_experts)


def _renumbered(tree: Any, axis: int, first: int, total: int) -> Any:
    """Return boxes of local experts, which Megatron numbers from 0 on, as boxes among all experts."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def at_axis(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    again = functools.partial(_renumbered, axis=axis, first=first, total=total)
    if isinstance(tree, dict):
        return {key: again(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(again(value) for value in tree)
    if isinstance(tree, ShardedTensorFactory):
        build = tree.build_fn
        return replace(tree, build_fn=lambda *args, **kwargs: again(build(*args, **kwargs)))
    place: dict[str, Any] = {
        "global_shape": at_axis(tree.global_shape, total),
        "global_offset": at_axis(tree.global_offset, tree.global_offset[axis] + first),
    }
    if isinstance(tree, ShardedTensor):
        place["axis_fragmentations"] = None
    return replace(tree, **place)


#: Patches of the layer of experts; before 0.19 plans with stages refuse experts.
EXPERT_LAYER_PATCHES = (
    _with_own_experts,
    *(
        patched(
            f"megatron.core.transformer.moe.experts:{name}.sharded_state_dict",
            why="experts have the numbers that the plan gives them",
            only=">=0.19",
        )(_with_global_numbers)
        for name in ("SequentialMLP", "TEGroupedMLP")
    ),
)
