"""The model as far as time and memory depend on it: the shapes of a dense decoder-only transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_hexi.errors import HexiError
from megatron_hexi.yaml_schema import short

#: Megatron pads the vocabulary to a multiple of this times the tensor-parallel size
#: (its --make-vocab-size-divisible-by).
VOCAB_MULTIPLE = 128

_SIZES = (
    *("layers", "hidden_size", "heads", "kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"),
    *("learned_positions", "vocab_multiple"),
)
#: Far above any model, and small enough that weights can be counted.
_MOST = 2**32


@dataclass(frozen=True)
class Model:
    """A dense decoder.

    Args:
        name: for people.
        layers: transformer layers.
        hidden_size: width of the model.
        heads: query heads of a layer.
        kv_heads: key and value heads of a layer; divides `heads`.
        head_dim: size of one head.
        ffn_hidden_size: width inside the MLP.
        gated: whether the MLP has a gate beside its first matrix (SwiGLU), so three matrices instead of two.
        vocab_size: tokens of the vocabulary, without padding.
        tied_embeddings: whether input and output embedding are the same weights.
        biases: whether linear layers have biases (GPT-2, GPT-3) or not (Llama).
        qk_norm: whether each head's queries and keys are normalised (Qwen3).
        learned_positions: positions with a learned embedding; 0 for rotary ones.
        qkv_bias: whether queries, keys and values have biases where other linear layers have none (Qwen2).
        norm_biases: whether norms have biases (LayerNorm) or not (RMSNorm); ``None``: if linear layers do.
        output_gate: whether attention's output is gated, by as many further columns as there are queries.
        sinks: whether each head has a learned offset in its softmax.
        vocab_multiple: what Megatron pads the vocabulary to a multiple of, times the tensor-parallel size.
        source: where the shape comes from.

    Raises:
        HexiError: a size that is no whole number above 0, or heads that KV heads do not divide.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    gated: bool
    vocab_size: int
    tied_embeddings: bool
    biases: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    qkv_bias: bool = False
    norm_biases: bool | None = None
    output_gate: bool = False
    sinks: bool = False
    vocab_multiple: int = VOCAB_MULTIPLE
    source: str = ""

    def __post_init__(self) -> None:
        for field in _SIZES:
            value = getattr(self, field)
            least = 0 if field == "learned_positions" else 1
            if type(value) is not int or not least <= value <= _MOST:
                raise HexiError(
                    f"model {self.name}: {field} = {short(value)}; write a whole number from {least} to "
                    f"{_MOST}"
                )
        if self.heads % self.kv_heads:
            raise HexiError(
                f"model {self.name}: kv_heads = {self.kv_heads} does not divide the {self.heads} heads; "
                "give a number that does"
            )

    def padded_vocab(self, tensor_parallel: int = 1) -> int:
        """The vocabulary as Megatron pads it."""
        multiple = self.vocab_multiple * tensor_parallel
        return math.ceil(self.vocab_size / multiple) * multiple

    def matrix_params(self, tensor_parallel: int = 1) -> int:
        """Weights of one layer's matrices on one tensor-parallel rank.

        QKV: hidden x (heads + 2 kv) x D, and a gate of the output as much as the queries; projection: heads x
        D x hidden; MLP: 2 (gated: 3) x hidden x ffn. Megatron gives every rank at least one KV head.
        """
        heads, kv_heads = self.heads // tensor_parallel, max(1, self.kv_heads // tensor_parallel)
        attention = self.hidden_size * self.head_dim * ((2 + self.output_gate) * heads + 2 * kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size // tensor_parallel
        return attention + mlp

    def vector_params(self, tensor_parallel: int = 1) -> int:
        """Weights of one layer's norms and biases on one tensor-parallel rank.

        Norms and the biases of row-parallel layers (projection, second of the MLP) are on every rank.
        """
        vectors = 2 * self.norm_params(self.hidden_size)
        if self.qk_norm:
            vectors += 2 * self.norm_params(self.head_dim)
        heads, kv_heads = self.heads // tensor_parallel, max(1, self.kv_heads // tensor_parallel)
        if self.biases or self.qkv_bias:
            vectors += self.head_dim * ((1 + self.output_gate) * heads + 2 * kv_heads)
        if self.biases:
            vectors += (2 if self.gated else 1) * self.ffn_hidden_size // tensor_parallel
            vectors += 2 * self.hidden_size
        return vectors + (heads if self.sinks else 0)

    def norm_params(self, width: int) -> int:
        """Weights of a norm over so many values: a scale, and a bias with LayerNorm."""
        has_bias = self.biases if self.norm_biases is None else self.norm_biases
        return width * (2 if has_bias else 1)

    def layer_params(self, tensor_parallel: int = 1) -> int:
        """Weights of one layer on one tensor-parallel rank."""
        return self.matrix_params(tensor_parallel) + self.vector_params(tensor_parallel)

    def vocab_params(self, tensor_parallel: int = 1) -> int:
        """Weights of one matrix over the padded vocabulary, input or output, on one tensor-parallel rank."""
        return self.padded_vocab(tensor_parallel) // tensor_parallel * self.hidden_size

    @property
    def total_params(self) -> int:
        """Weights of the whole model."""
        embeddings = self.vocab_params() * (1 if self.tied_embeddings else 2)
        positions = self.learned_positions * self.hidden_size
        last_norm = self.norm_params(self.hidden_size)
        return self.layers * self.layer_params() + embeddings + positions + last_norm
