"""Multi-latent attention whose latent columns travel between ranks, in place of keys and values.

Megatron multiplies a token's latent columns with the matrix of `linear_kv_up_proj` where the token lies.
Under a plan with `workload.latent_exchange` the layer hands the columns and the matrix to our core attention,
in place of key and value, which multiplies them where they are used. `linear_kv_up_proj` stays the owner of
the matrix: it is still called, so that its hooks wait for weights that are gathered, and gives its input,
brought together over tensor-parallel ranks as for its product.

With or without it, all heads read one rotary key: `_with_summed_rotary_columns` adds its gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import patched

_MODULE = "megatron.core.transformer.multi_latent_attention"
_LAYER = f"{_MODULE}:MLASelfAttention"


def latent_columns_travel() -> bool:
    """Return whether latent columns travel under the active plan."""
    session = active_session()
    return session is not None and session.given.plan.workload.latent_exchange is not None


@patched(
    f"{_LAYER}.__init__",
    only=">=0.19",  # before, latent columns do not travel
    why="where latent columns travel, leaves the product that makes keys and values to core attention",
)
def _with_columns(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if latent_columns_travel():
        up = self.linear_kv_up_proj
        up.forward = functools.partial(_columns, up, self.config, self.pg_collection.tp)


def _columns(up: Any, config: Any, tp_group: Any, columns: Tensor) -> tuple[Tensor, None]:
    """Return the input of a projection for the rows of all ranks of the unit, and ``None``.

    The input is normalised if the projection includes a norm.
    """
    weight = getattr(up, "layer_norm_weight", None)
    if weight is not None:  # Transformer Engine's norm and projection in one
        dtype, bias, size = columns.dtype, getattr(up, "layer_norm_bias", None), (columns.shape[-1],)
        if up.zero_centered_gamma:  # 16 bits have too few digits for 1 + gamma
            wide = torch.promote_types(dtype, torch.float32)
            columns, weight = columns.to(wide), weight.to(wide) + 1
            bias = None if bias is None else bias.to(wide)
        if up.normalization == "RMSNorm":
            columns = torch.nn.functional.rms_norm(columns, size, weight, up.eps).to(dtype)
        else:
            columns = torch.nn.functional.layer_norm(columns, size, weight, bias, up.eps).to(dtype)
    if config.sequence_parallel:
        return gather_from_sequence_parallel_region(columns, group=tp_group), None
    return copy_to_tensor_model_parallel_region(columns, group=tp_group), None


def _with_summed_rotary_columns(
    original: Callable[..., Any], self: Any, hidden_states: Tensor
) -> tuple[Tensor, Tensor]:
    of_query, combined = original(self, hidden_states)
    if active_session() is None or self.tp_group.size() == 1:
        return of_query, combined
    config = self.config
    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    if combined.shape[-1] != sum(sizes):  # cut over tensor-parallel ranks, each with all rows
        combined = gather_from_tensor_model_parallel_region(combined, group=self.tp_group)
        if config.sequence_parallel:  # the rotary columns are gathered again, and then summed
            combined = scatter_to_sequence_parallel_region(combined, group=self.tp_group)
    if not config.sequence_parallel:
        columns, rotary = combined.split(sizes, dim=-1)
        rotary = copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)
        combined = torch.cat([columns, rotary], dim=-1)
    return of_query, combined


@patched(
    f"{_LAYER}.get_query_key_value_tensors",
    only=">=0.19",
    why="gives core attention latent columns and the matrix in place of keys and values",
    parameters=(
        *("self", "hidden_states", "key_value_states", "position_ids", "packed_seq_params"),
        *("inference_context", "inference_params"),
    ),
)
def _with_columns_as_key(
    original: Callable[..., Any], self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if latent_columns_travel():
        return _latent_tensors(self, hidden_states)
    return original(self, hidden_states, *args, **kwargs)


def _latent_tensors(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what Megatron's method returns, with latent columns for a key and the matrix for a value.

    Args:
        hidden_states: [L, B, hidden].

    Returns:
        query [L, B, H, N + R]; columns [L, B, 1, C + R], the last with rotary positions; matrix
        [H (N + V), C]; latent columns of the query; columns without positions, [L, B, C].
    """
    config = layer.config
    length = layer.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, config, None)
    embedding, scale = layer.rotary_pos_emb(length, packed_seq=False), 1.0
    if config.rope_type != "rope":
        embedding, scale = embedding
    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]

    of_query, combined = layer._qkv_down_projection(hidden_states)
    columns, rotary = combined.split(sizes, dim=-1)
    if config.sequence_parallel:
        rotary = gather_from_sequence_parallel_region(rotary, group=layer.tp_group)

    if config.q_lora_rank is None:
        query, _ = layer.linear_q_proj(of_query)
    else:
        of_query = layer.q_layernorm(of_query)
        query, _ = layer.linear_q_up_proj(of_query)
    query = query.unflatten(-1, (layer.num_attention_heads_per_partition, layer.q_head_dim))
    columns, _ = layer.linear_kv_up_proj(layer.kv_layernorm(columns))

    def turned(part: Tensor) -> Tensor:
        return apply_rotary_pos_emb(
            part,
            embedding[: len(part)],
            config=config,
            mscale=scale,
            cp_group=layer.pg_collection.cp,
            mla_rotary_interleaved=True,
        )

    plain, positions = query.split([config.qk_head_dim, sizes[1]], dim=-1)
    query = torch.cat([plain, turned(positions)], dim=-1)
    key = torch.cat([columns.unsqueeze(-2), turned(rotary.unsqueeze(-2))], dim=-1)
    return query, key, layer.linear_kv_up_proj.weight, of_query, columns


LATENT_PATCHES = (
    *(
        patched(
            f"{_MODULE}:{layer}._qkv_down_projection",
            why="sums the gradients of rotary columns over the heads of all tensor-parallel ranks",
        )(_with_summed_rotary_columns)
        for layer in ("MLASelfAttention", "FusedMLASelfAttention")
    ),
    _with_columns,
    _with_columns_as_key,
)
