"""What is replaced in Megatron for stages that differ. Without such a plan each calls the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.checkpoints import _by_rank, _into_buckets, _of_whole_models, stages_active
from megatron_hexi.megatron.stages.communicator import BorderCommunicator
from megatron_hexi.megatron.stages.gradients import _over_all_holders, _with_pieces
from megatron_hexi.megatron.stages.optimizer import _for_pieces
from megatron_hexi.megatron.stages.slices import MINISTAGE_PATCHES
from megatron_hexi.patching import Patch


def _over_borders(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_communicator(pp_group: Any, config: Any) -> Any:
        session = active_session()
        if session is None or session.stages is None:
            return original(pp_group=pp_group, config=config)
        return BorderCommunicator(session.stages.channels, pp_group.rank(), pp_group.size(), config)

    return make_communicator


def _of_equal_stages(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def report_theoretical_memory(*args: Any, **kwargs: Any) -> Any:
        return None if stages_active() else original(*args, **kwargs)

    return report_theoretical_memory


STAGES_PATCHES = (
    *MINISTAGE_PATCHES,
    Patch(
        target="megatron.core.pipeline_parallel.schedules:P2PCommunicator",
        why="rows travel between stages by the plan's table",
        build=_over_borders,
    ),
    Patch(
        target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        why="gradients are summed over whoever holds a piece of a weight",
        build=_with_pieces,
    ),
    Patch(
        target="megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        why="gradients are divided by the tokens of all ranks that compute the loss",
        build=_over_all_holders,
        parameters=("model", "num_tokens", "pg_collection", "force_all_reduce"),
    ),
    Patch(
        target="megatron.core.optimizer:get_megatron_optimizer",
        why="each rank keeps the optimizer's state of what it owns",
        build=_for_pieces,
    ),
    Patch(
        target="megatron.training.theoretical_memory_usage:report_theoretical_memory",
        why="Megatron's estimate of memory is for one rectangle of ranks",
        build=_of_equal_stages,
    ),
    Patch(
        target="megatron.training.checkpointing:get_rng_state",
        why="random states are stored by rank",
        build=_by_rank,
    ),
    Patch(
        target="megatron.training.checkpointing:save_checkpoint",
        why="the checkpoint's grid of random states is a chain of all ranks; shares of weights come together",
        build=_of_whole_models,
    ),
    Patch(
        target="megatron.training.checkpointing:load_checkpoint",
        why="the checkpoint's grid of random states is a chain of ranks; loaded weights are in all buckets",
        build=_into_buckets,
    ),
)
