"""Attention of query heads to keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from megatron_hexi.kinds.part import Columns, LayerPart, WeightMatrix

if TYPE_CHECKING:
    from megatron_hexi.kinds.decoder import Decoder


def head_counts(model: Decoder, width: int) -> tuple[int, int]:
    """Return the query heads and the KV heads (at least one) on each of `width` ranks."""
    return model.heads // width, max(1, model.kv_heads // width)


class SoftmaxAttention(LayerPart):
    """Attention whose keys and values are made of the hidden state."""

    title = "full attention"
    attends = True
    norm_apart = (False, True)
    #: Whether latent columns travel in place of keys and values, in each of the exchanges that there are.
    exchanges: ClassVar[tuple[bool, ...]] = (False,)

    def planned_sizes(self, sends_latent: bool) -> dict[str, Any]:
        """Return the workload fields of a plan that this attention needs besides number and size of heads."""
        del sends_latent
        return {}

    def value_size(self, model: Decoder) -> int:
        """Return the size of one head's value."""
        return model.head_dim

    def expansion(self, model: Decoder) -> WeightMatrix:
        """Return the matrix from latent columns to one head's key and value; 0 x 0 without such columns."""
        del model
        return WeightMatrix(0, 0)

    def matrices(self, model: Decoder, width: int) -> tuple[WeightMatrix, ...]:
        """Return the projection, and QKV: hidden x (heads + 2 kv) D, with a gate another hidden x heads D."""
        heads, kv_heads = head_counts(model, width)
        columns = model.head_dim * ((1 + model.output_gate) * heads + 2 * kv_heads)
        return (
            WeightMatrix(heads * self.value_size(model), model.hidden_size),
            WeightMatrix(model.hidden_size, columns),
        )

    def vectors(self, model: Decoder, width: int) -> int:
        """Return the number of weights in norms of queries and keys, in biases and in sinks.

        Every rank has the whole bias of the projection, whose matrix is row-parallel.
        """
        heads, kv_heads = head_counts(model, width)
        columns = model.head_dim * ((1 + model.output_gate) * heads + 2 * kv_heads)
        return (
            2 * model.norm_params(model.head_dim) * model.qk_norm
            + columns * (model.biases or model.qkv_bias)
            + model.hidden_size * model.biases
            + heads * model.sinks
        )

    def row_columns(self, model: Decoder, width: int, row_parts: int, sends_latent: bool) -> Columns:
        """Return the `Columns` of a row, for H query heads and K KV heads of D columns.

        Rotary (H + K) D, queries of grouped heads copied 2 H D, gradients put together 2 (H + 2 K) D.
        """
        heads, kv_heads = (model.head_dim * count for count in head_counts(model, width))
        gated = heads * model.output_gate
        return Columns(
            normed=(heads + kv_heads) * model.qk_norm,
            turned=0.0 if model.learned_positions else heads + kv_heads,
            copied=2 * heads * (model.kv_heads < model.heads),
            copied_back=2 * (heads + 2 * kv_heads),
            gated=gated,
            inputs=self.value_size(model) * model.heads / width,
            outputs=heads + 2 * kv_heads,
            kept=2 * gated,
        )

    def mixing_flops(self, model: Decoder, keys: float) -> float:
        """Return a token's forward FLOPs of the products of queries and keys, and of those with values."""
        return 2.0 * keys * model.heads * (model.head_dim + self.value_size(model))
