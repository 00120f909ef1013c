"""Patches of Megatron for stages that differ. Without such a plan each calls the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.communicator import BorderCommunicator
from megatron_hexi.megatron.stages.dispatcher import DISPATCHER_PATCH
from megatron_hexi.megatron.stages.experts import EXPERT_LAYER_PATCHES
from megatron_hexi.megatron.stages.gradients import GRADIENT_PATCHES
from megatron_hexi.megatron.stages.piece_optimizer import norm_of_slabs, optimizer_of_slabs
from megatron_hexi.megatron.stages.routers import ROUTER_PATCHES
from megatron_hexi.megatron.stages.slices import MINISTAGE_PATCHES
from megatron_hexi.megatron.stages.stage_checkpoints import STAGE_CHECKPOINT_PATCHES, stages_active
from megatron_hexi.patching import patched


@patched(
    "megatron.core.pipeline_parallel.schedules:P2PCommunicator",
    why="rows travel between stages by the plan's table",
)
def over_borders(original: Callable[..., Any], pp_group: Any, config: Any) -> Any:
    """Return a communicator over the plan's borders, in place of Megatron's."""
    session = active_session()
    if session is None or session.stages is None:
        return original(pp_group=pp_group, config=config)
    return BorderCommunicator(session.stages.channels, pp_group.rank(), pp_group.size(), config)


@patched(
    "megatron.training.theoretical_memory_usage:report_theoretical_memory",
    why="Megatron's estimate of memory is for one rectangle of ranks",
)
def _of_equal_stages(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return None if stages_active() else original(*args, **kwargs)


STAGES_PATCHES = (
    *MINISTAGE_PATCHES,
    *EXPERT_LAYER_PATCHES,
    DISPATCHER_PATCH,
    *ROUTER_PATCHES,
    over_borders,
    *GRADIENT_PATCHES,
    optimizer_of_slabs,
    norm_of_slabs,
    _of_equal_stages,
    *STAGE_CHECKPOINT_PATCHES,
)
