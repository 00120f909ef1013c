"""Multi-token prediction: shifts across the borders of shards, and losses that count tokens.

A head that predicts the token after the next takes tokens, labels and masks one position further on. These
are a few bytes a token, so they are gathered on every rank, shifted there, and cut again: otherwise each end
of a plan's many small segments would need a message.
"""

from __future__ import annotations

import copy
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

_LOSS = (
    *("hidden_states", "labels", "loss_mask", "output_layer", "output_weight"),
    *("runtime_gather_output", "is_training", "compute_language_model_loss", "config", "cp_group"),
)

_MODULE = "megatron.core.transformer.multi_token_prediction"


@patched(f"{_MODULE}:roll_tensor", why="shifts tokens over the borders of the plan's shards")
def _over_borders(
    original: Callable[..., Any],
    tensor: Tensor | None,
    shifts: int = -1,
    dims: int = -1,
    cp_group: dist.ProcessGroup | None = None,
    packed_seq_params: Any = None,
) -> Any:
    session = active_session()
    if session is None or tensor is None:
        return original(tensor, shifts, dims, cp_group, packed_seq_params)
    assert dims in (-1, tensor.dim() - 1), "tokens are the last dimension"
    ends = document_ends(packed_seq_params)
    shard = packed_shard(session, ends).shard
    shifted, total = original(_gathered(tensor, session, shard), shifts, dims)
    if ends is not None:  # the last token of a document has no next one
        shifted[..., ends.flatten()[1:] - 1] = 0
        total = shifted.sum()
    if tensor.is_floating_point():  # a mask; the sum of tokens or positions is not used
        total = _of_the_micro_batch(total, session)
    rolled = shifted.index_select(-1, shard.positions)
    rolled[..., shard.tokens :] = 0
    return rolled, total


def _gathered(tensor: Tensor, session: Session, shard: LocalShard) -> Tensor:
    """Return the whole sequences, [B, S], of which each rank of a domain holds some rows."""
    whole = tensor.new_zeros(*tensor.shape[:-1], session.seq_length)
    whole[..., shard.positions[: shard.tokens]] = tensor[..., : shard.tokens]
    dist.all_reduce(whole, group=session.attention.domain_group)
    return whole


def _of_the_micro_batch(count: Tensor, session: Session) -> Tensor:
    """Return the number of tokens that count in a micro-batch, given the number in this rank's domain."""
    stages = session.stages
    if stages is None or stages.micro_batch is None:
        return count
    counts = stages.view.rank == stages.view.place.domain.members[0].ranks[0]
    total = count if counts else torch.zeros_like(count)
    dist.all_reduce(total, group=stages.micro_batch)
    return total


@patched(
    f"{_MODULE}:process_mtp_loss",
    why="weighs the losses of further tokens by the counts of all ranks",
    parameters={
        "<0.19": (*_LOSS, "packed_seq_params", "scale_logits_fn"),
        ">=0.19": (*_LOSS, "tp_group", "packed_seq_params", "scale_logits_fn", "input_ids"),
    },
)
def _over_all_tokens(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    session = active_session()
    call = inspect.signature(original).bind(*args, **kwargs)
    mask = call.arguments.get("loss_mask")
    if session is not None and mask is not None:
        # Megatron multiplies a head's mean loss by the tokens that count before the shift, so that the
        # division by all tokens at the end leaves the mean; it takes them from this rank alone. Here the
        # tokens of all ranks are used, as in the mean, as part of the loss's factor.
        counted = mask.sum()
        dist.all_reduce(counted, group=session.attention.domain_group)
        counted = _of_the_micro_batch(counted, session)
        config = copy.copy(call.arguments["config"])
        config.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * counted
        config.calculate_per_token_loss = False
        call.arguments["config"] = config
    return original(*call.args, **call.kwargs)


def _summed(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def save_metrics_to_tracker(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        from megatron.core import parallel_state

        session = active_session()
        if session is not None:
            # Megatron takes the mean over ranks, each of which has its part of the sum over the total count.
            # Unequal replicas form one context-parallel group, whose size divides the sum of their means.
            # Where stages differ, that group is the ranks that compute a loss.
            stages = session.stages
            parts = (
                parallel_state.get_context_parallel_world_size()
                if stages is None
                else stages.view.loss.size()
            )
            loss = loss * parts
        function(loss, *args, **kwargs)

    return staticmethod(save_metrics_to_tracker)


@patched(
    "megatron.core.models.common.language_module.language_module"
    ":LanguageModule.setup_embeddings_and_output_layer",
    why="a last stage that predicts further tokens has one copy of the tied embedding",
    only=">=0.19",
)
def _with_one_copy(original: Callable[..., None], self: Any) -> None:
    session = active_session()
    has_copy = (
        session is not None
        and session.stages is not None
        and self.share_embeddings_and_output_weights
        and self.post_process
        and not self.pre_process
        and self.mtp_process
    )
    if has_copy:
        # Megatron makes a weight of the output layer here, uses that of the embedding, and then refuses
        # to save the other.
        self.output_layer.weight = None
    original(self)
    if has_copy:
        # The output layer adds its gradient to `main_grad` itself, and autograd brings the gradient of
        # the embedding. With this mark the layer returns zeros to autograd, and DDP adds its gradient.
        self.shared_embedding_or_output_weight().zero_out_wgrad = True


MULTI_TOKEN_PATCHES = (
    _with_one_copy,
    _over_borders,
    _over_all_tokens,
    *(
        Patch(
            target=f"{_MODULE}:MTPLossLoggingHelper.{saver}",
            why="logs the losses of further tokens as means over tokens, not over ranks",
            build=_summed,
            parameters=("loss", *counts, "layer_number", "num_layers", "reduce_group", "avg_group"),
            only=versions,
        )
        for saver, counts, versions in (
            ("save_loss_to_tracker", (), "<0.19"),
            ("save_metrics_to_tracker", ("correct", "total"), ">=0.19"),
        )
    ),
)
