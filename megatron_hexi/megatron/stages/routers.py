"""Patches of MoE routers for stages with layers of their own: the ranks over which each sum is taken.

With ``--calculate-per-token-loss`` the loss of a micro-batch is weighted by its tokens, and the sum is
divided by the tokens of the global batch. So a balancing loss that is right for each micro-batch is right
however replicas share the micro-batches (`global_aux_loss` only with one replica).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.experts import active_experts
from megatron_hexi.megatron.stages.stages_session import StagesSession
from megatron_hexi.patching import patched


@patched(
    "megatron.core.transformer.moe.router:TopKRouter.__init__",
    why="a router's losses count the tokens of a micro-batch, whatever ranks hold them",
    only=">=0.19",
)
def _of_a_micro_batch(
    original: Callable[..., None],
    self: Any,
    config: Any,
    pg_collection: Any = None,
    is_mtp_layer: bool = False,
) -> None:
    original(self, config, pg_collection, is_mtp_layer)
    view = active_experts()
    if view is not None:
        self.tp_cp_group = self.tp_dp_cp_group = view.micro_batch


@patched(
    "megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
    why="the loss of sequences counts the tokens of each, whatever ranks hold them",
    only=">=0.19",
)
def _of_a_sequence(original: Callable[..., Tensor], self: Any, *args: Any, **kwargs: Any) -> Tensor:
    view = active_experts()
    if view is None:
        return original(self, *args, **kwargs)
    self.tp_cp_group = view.sequence
    try:
        return original(self, *args, **kwargs)
    finally:
        self.tp_cp_group = view.micro_batch


@patched(
    "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics",
    why="logs a router's losses as sums over all ranks, each of which has a part of a micro-batch's value",
    only=">=0.19",
)
def _over_the_job(
    original: Callable[..., None], self: Any, metric_names: list[str], pg_collection: Any = None
) -> None:
    session = active_session()
    if session is None or session.stages is None:
        original(self, metric_names, pg_collection)
        return
    for name in metric_names:
        if name in self._metrics:
            dist.all_reduce(self._metrics[name].values, group=session.stages.view.world)


ROUTER_PATCHES = (_of_a_micro_batch, _of_a_sequence, _over_the_job)


def end_iteration(model: list[Any], stages: StagesSession) -> None:
    """Update the experts' biases by the tokens of all ranks, and reset the routers' counts.

    Replicas may cut the layers differently, so the counts of all layers are summed in one table over the job.

    Args:
        stages: the stages part of this rank's session.
    """
    from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    if stages.experts is None:
        return
    config = model[0].config
    if config.moe_router_enable_expert_bias:
        routers = [
            module
            for chunk in model
            for module in chunk.modules()
            if getattr(module, "expert_bias", None) is not None
        ]
        layers = config.num_layers + (config.mtp_num_layers or 0)
        counts, biases = torch.zeros(2, layers, config.num_moe_experts, device=torch.cuda.current_device())
        for router in routers:
            counts[_row(router)] = router.local_tokens_per_expert
            biases[_row(router)] = router.expert_bias
        updated = get_updated_expert_bias(
            counts, biases, config.moe_router_bias_update_rate, tp_dp_cp_group=stages.view.world
        )
        for router in routers:
            router.expert_bias.copy_(updated[_row(router)])
    reset_model_temporary_tensors(config, model)


def _row(router: Any) -> int:
    """Return the row of a router's layer in the table of all layers.

    Layers of multi-token prediction, which Megatron numbers from 1 again, follow the others.
    """
    return int(router.layer_number) - 1 + router.is_mtp_layer * int(router.config.num_layers)
