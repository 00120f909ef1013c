"""Losses of routers that count tokens, where Megatron assumes ranks of equal size.

Megatron takes the tokens of all ranks as this rank's tokens times the number of ranks, in the balancing
losses and in their scale under a mean over tokens. Both are silently wrong where shards differ. It also
counts every row, while a shard's padding rows are no tokens (but each is sent to experts, which need rows on
every rank).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.megatron.packing import document_ends, packed_shard
from megatron_hexi.megatron.session import LocalShard, Session, active_session
from megatron_hexi.patching import Patch, patched
from megatron_hexi.runtime.waiting import waiting

#: Number of tokens of each sample, without padding, that the router at work was given last.
_routed: Tensor = torch.zeros(())


@patched(
    "megatron.core.transformer.moe.router:TopKRouter.routing",
    why="padding rows do not count in the router's losses",
)
def _without_padding(
    original: Callable[..., tuple[Tensor, Tensor]],
    self: Any,
    logits: Tensor,
    padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    global _routed
    session = active_session()
    if session is None:
        return original(self, logits, padding_mask)
    if not session.given.terms.has_documents:  # else the layer has marked them
        padding = padding_rows(session.shard, logits.shape[0], logits.device)
        padding = padding[:, None].expand(logits.shape[:2])
        padding_mask = padding if padding_mask is None else padding | padding_mask
    assert padding_mask is not None
    _routed = (~padding_mask).sum() / padding_mask.shape[1]
    return original(self, logits, padding_mask)


@patched(
    "megatron.core.transformer.transformer_layer:TransformerLayer._maybe_unflatten_for_moe",
    why="which rows are padding depends on the documents, which a router is not given",
    only=">=0.19",  # before, packed sequences are refused under a plan
)
def _marked(
    original: Callable[..., tuple[Tensor, Tensor | None, int | None]],
    self: Any,
    hidden_states: Tensor,
    padding_mask: Tensor | None,
    packed_seq_params: Any,
) -> tuple[Tensor, Tensor | None, int | None]:
    session = active_session()
    if session is not None and self.is_moe_layer and packed_seq_params is not None:
        shard = packed_shard(session, document_ends(packed_seq_params)).shard
        padding = padding_rows(shard, hidden_states.shape[0], hidden_states.device)[None]
        padding_mask = padding if padding_mask is None else padding | padding_mask
    return original(self, hidden_states, padding_mask, packed_seq_params)


def padding_rows(shard: LocalShard, rows: int, device: torch.device) -> Tensor:
    """Return which of a rank's rows are padding, [rows] of bool.

    Under sequence parallelism the rank's rows are a part of the shard's.
    """
    from megatron.core import parallel_state

    first = parallel_state.get_tensor_model_parallel_rank() * rows if rows < shard.rows else 0
    return torch.arange(first, first + rows, device=device) >= shard.tokens


@patched(
    "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
    why="padding rows do not count in the expert bias",
)
def _counting_tokens(
    original: Callable[..., None], self: Any, routing_map: Tensor, padding_mask: Tensor | None = None
) -> None:
    if active_session() is not None and padding_mask is not None:
        # Megatron 0.19 combines [rows, experts] with [rows], which fits by accident or not at all.
        routing_map, padding_mask = routing_map & ~padding_mask[:, None], None
    original(self, routing_map, padding_mask)


@patched(
    "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
    why="the tokens of all ranks are not this rank's times the number of ranks",
)
def _of_all_ranks(
    original: Callable[..., tuple[Any, Any, Any]],
    routing_map: Tensor,
    reduce_group: dist.ProcessGroup,
    topk: int | None = None,
    with_padding_mask: bool = False,
) -> tuple[Any, Any, Any]:
    with waiting("experts"):
        per_expert, local, total = original(routing_map, reduce_group, topk, with_padding_mask)
    if active_session() is not None:
        # Megatron multiplies the second by the number of ranks, to scale a loss by the tokens of all
        # ranks.
        local = total / dist.get_world_size(reduce_group)
    return per_expert, local, total


def _weighed(original: Callable[..., None], value: str) -> Callable[..., None]:
    from megatron.core import parallel_state

    signature = inspect.signature(original)

    @functools.wraps(original)
    def record(*args: Any, **kwargs: Any) -> None:
        session = active_session()
        call = signature.bind(*args, **kwargs)
        if session is not None and session.stages is not None:
            call.arguments[value] = call.arguments[value] * _part(session, call.arguments["name"])
        elif session is not None and call.arguments["name"] == "z_loss":
            call.arguments[value] = call.arguments[value] * _share(session)
            # Before 0.19 Megatron logs the loss of one rank.
            call.arguments["avg_group"] = parallel_state.get_tensor_and_data_parallel_group(
                with_context_parallel=True
            )
        original(*call.args, **call.kwargs)

    return record


@patched(
    "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.ensure_initialized",
    why="stages of a hybrid model without experts sum as many values as those with experts",
    only=">=0.19",  # before, hybrid models are refused beside a plan
)
def _for_all_layers(
    original: Callable[..., None], self: Any, name: str, num_layers: int, device: Any = None
) -> None:
    session = active_session()
    if session is not None:
        # Stages sum one table of all layers, in which a router has the row of its layer. Where a stage
        # has no router, Megatron makes a table with a row for each layer with experts only.
        num_layers = session.given.terms.layers
    original(self, name, num_layers, device)


def _scaled(original: Any) -> Any:
    from megatron.core import parallel_state

    function = original.__func__

    @functools.wraps(function)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        grad_output, scale = function(ctx, grad_output)
        if active_session() is not None:
            scale = scale * parallel_state.get_tensor_and_context_parallel_world_size()
        return grad_output, scale

    return staticmethod(backward)


def _share(session: Session) -> Tensor:
    """Return this rank's tokens over those of an equal shard: the weight of its mean in a mean over ranks."""
    from megatron.core import parallel_state

    ranks = dist.get_world_size(session.attention.domain_group)
    return _tokens(session) * ranks * parallel_state.get_tensor_model_parallel_world_size()


def _part(session: Session, name: str) -> Tensor | float:
    """Return the weight of this rank's loss in its micro-batch's loss, a sum over the ranks of the stage."""
    assert session.stages is not None
    samples, stages = session.stages.view.place.samples, session.stages
    part = (samples[1] - samples[0]) / stages.mesh.micro_batch_size
    if name == "z_loss":
        return part * _tokens(session)
    return part if name == "seq_load_balancing_loss" else 1.0


def _tokens(session: Session) -> Tensor:
    """Return the part of a sequence that the rows which are being routed hold."""
    return _routed / session.seq_length


EXPERT_PATCHES = (
    _without_padding,
    _marked,
    _counting_tokens,
    _of_all_ranks,
    _for_all_layers,
    Patch(
        target="megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.backward",
        why="scales a router's losses by the tokens of all ranks, where Megatron took one rank's",
        build=_scaled,
        parameters=("ctx", "grad_output"),
        only="<0.19",
    ),
    *(
        Patch(
            target=f"megatron.core.transformer.moe.{target}",
            why="logs the z-loss as a mean over tokens, not over ranks",
            build=functools.partial(_weighed, value=names[-1]),
            parameters=(*names, "layer_number", "num_layers", "reduce_group", "avg_group", last),
            only=versions,
        )
        for target, names, last, versions in (
            ("moe_utils:save_to_aux_losses_tracker", ("name", "loss"), "reduce_group_has_dp", "<0.18"),
            ("moe_logging:MoEMetricsTracker.record", ("self", "name", "value"), "needs_dp_avg", ">=0.18"),
        )
    ),
)
