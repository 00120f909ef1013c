"""Weights of one layer on one tensor-parallel rank, without those of routed experts.

Megatron gives every rank at least one KV head, the whole router and shared experts' gate, norms of the hidden
state, and biases of row-parallel matrices (attention's projection, the second of the MLP).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_hexi.models.model import Model


def layer_matrices(model: Model, tensor_parallel: int) -> int:
    """Return the weights of the matrices of a layer.

    QKV: hidden x (heads + 2 kv) x D, and a gate of the output as much as the queries; projection: heads x D x
    hidden; MLP: 2 (gated: 3) x hidden x ffn; with experts the shared ones, and the router, hidden x experts.
    Heads with a state: hidden x the columns of their projection, and their outputs x hidden.

    Args:
        model: the model, with layers of one kind.
        tensor_parallel: ranks that share the layer.
    """
    if model.state is not None:
        mixing = model.hidden_size * (model.state.columns + model.state.inner) // tensor_parallel
    else:
        mixing = _attention_matrices(model, tensor_parallel) if model.has_attention else 0
    return mixing + (_mlp_matrices(model, tensor_parallel) if model.has_mlp else 0)


def layer_vectors(model: Model, tensor_parallel: int) -> int:
    """Return the weights of a layer beside its matrices: norms, biases, convolutions; arguments likewise."""
    vectors = model.parts * (1 + model.post_norms) * model.norm_params(model.hidden_size)
    if model.state is not None:
        vectors += model.state.vectors(tensor_parallel, model.norm_params)
    elif model.has_attention:
        vectors += _attention_vectors(model, tensor_parallel)
    if model.biases and model.has_mlp:
        vectors += _mlp_biases(model, tensor_parallel)
    if model.experts is not None:
        vectors += model.experts.count * model.experts.score_bias
        vectors += model.hidden_size * model.experts.shared_gate
    return vectors


def _attention_matrices(model: Model, tensor_parallel: int) -> int:
    heads, kv_heads = model.heads // tensor_parallel, max(1, model.kv_heads // tensor_parallel)
    if model.latent is None:
        return model.hidden_size * model.head_dim * ((2 + model.output_gate) * heads + 2 * kv_heads)
    # Of the matrices up from the latent columns a rank has the part of its heads.
    latent = model.latent
    up = heads * ((latent.query_rank or model.hidden_size) * model.head_dim + model.expansion_params)
    return model.down_params + model.hidden_size * heads * latent.value_dim + up


def _mlp_matrices(model: Model, tensor_parallel: int) -> int:
    matrices = 3 if model.gated else 2
    if model.experts is None:
        return matrices * model.hidden_size * model.ffn_hidden_size // tensor_parallel
    shared = matrices * model.hidden_size * model.experts.shared_ffn_hidden_size // tensor_parallel
    return shared + model.hidden_size * model.experts.count


def _attention_vectors(model: Model, tensor_parallel: int) -> int:
    vectors = 0
    if model.latent is not None:
        vectors += model.norm_params(model.latent.kv_rank) + model.norm_params(model.latent.query_rank or 0)
    if model.qk_norm:
        vectors += 2 * model.norm_params(model.head_dim)
    heads, kv_heads = model.heads // tensor_parallel, max(1, model.kv_heads // tensor_parallel)
    if model.biases or model.qkv_bias:
        vectors += model.head_dim * ((1 + model.output_gate) * heads + 2 * kv_heads)
    if model.biases:
        vectors += model.hidden_size
    return vectors + (heads if model.sinks else 0)


def _mlp_biases(model: Model, tensor_parallel: int) -> int:
    first = 2 if model.gated else 1
    if model.experts is None:
        return first * model.ffn_hidden_size // tensor_parallel + model.hidden_size
    width = model.experts.shared_ffn_hidden_size
    shared = first * width // tensor_parallel + model.hidden_size if width else 0
    return model.experts.count + shared
