"""Patches of Megatron for stages that differ. Without such a plan each calls the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.communicator import BorderCommunicator
from megatron_hexi.megatron.stages.dispatcher import _over_slots
from megatron_hexi.megatron.stages.experts import _with_global_numbers, _with_own_experts
from megatron_hexi.megatron.stages.gradients import _over_all_holders, _with_pieces
from megatron_hexi.megatron.stages.piece_optimizer import _for_pieces
from megatron_hexi.megatron.stages.routers import _of_a_micro_batch, _of_a_sequence, _over_the_job
from megatron_hexi.megatron.stages.slices import MINISTAGE_PATCHES
from megatron_hexi.megatron.stages.stage_checkpoints import (
    _by_rank,
    _into_buckets,
    _of_whole_models,
    stages_active,
)
from megatron_hexi.patching import Patch, patched


@patched(
    "megatron.core.pipeline_parallel.schedules:P2PCommunicator",
    why="rows travel between stages by the plan's table",
)
def _over_borders(original: Callable[..., Any], pp_group: Any, config: Any) -> Any:
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


#: Patches of expert layers; before 0.19 plans with stages refuse experts.
_EXPERTS_OF_STAGES = (
    Patch(
        target="megatron.core.transformer.moe.moe_layer:BaseMoELayer.__init__",
        why="a rank holds the experts that the plan gives it",
        build=_with_own_experts,
        parameters=("self", "config", "layer_number", "pg_collection", "is_mtp_layer"),
        only=">=0.19",
    ),
    Patch(
        target="megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
        why="tokens travel to ranks with unequal numbers of experts",
        build=_over_slots,
        only=">=0.19",
    ),
    *(
        Patch(
            target=f"megatron.core.transformer.moe.experts:{name}.sharded_state_dict",
            why="experts have the numbers that the plan gives them",
            build=_with_global_numbers,
            parameters=("self", "prefix", "sharded_offsets", "metadata"),
            only=">=0.19",
        )
        for name in ("SequentialMLP", "TEGroupedMLP")
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.__init__",
        why="a router's losses count the tokens of a micro-batch, whatever ranks hold them",
        build=_of_a_micro_batch,
        parameters=("self", "config", "pg_collection", "is_mtp_layer"),
        only=">=0.19",
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
        why="the loss of sequences counts the tokens of each, whatever ranks hold them",
        build=_of_a_sequence,
        only=">=0.19",
    ),
    Patch(
        target="megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics",
        why="logs a router's losses as sums over unequal ranks",
        build=_over_the_job,
        parameters=("self", "metric_names", "pg_collection"),
        only=">=0.19",
    ),
)

STAGES_PATCHES = (
    *MINISTAGE_PATCHES,
    *_EXPERTS_OF_STAGES,
    _over_borders,
    Patch(
        target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        why="gradients are summed over all holders of a piece of a weight",
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
        why="each rank keeps the optimizer's state of its slabs",
        build=_for_pieces,
    ),
    _of_equal_stages,
    Patch(
        target="megatron.training.checkpointing:get_rng_state",
        why="random states are stored by rank",
        build=_by_rank,
    ),
    Patch(
        target="megatron.training.checkpointing:save_checkpoint",
        why="the checkpoint's grid of random states is a pipeline of all ranks; weights are gathered",
        build=_of_whole_models,
    ),
    Patch(
        target="megatron.training.checkpointing:load_checkpoint",
        why="the checkpoint's grid of random states is a pipeline of all ranks; loaded weights go to buckets",
        build=_into_buckets,
    ),
)
