"""The table of weights: the Hugging Face tensors that each tensor of Megatron's checkpoint is made of.

Megatron joins what it multiplies in one step. Queries, keys and values lie by KV group: the queries of a
group, its key, its value, then the next group; so a tensor-parallel rank's part is one block of rows. Gate
and up lie one after the other. Both formats rotate halves of a head (Megatron without
``--rotary-interleaved``): no rows move inside a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_hexi.convert.config import DenseModel


@dataclass(frozen=True)
class Weight:
    """A tensor of Megatron's checkpoint, of one layer or of the whole model.

    Attributes:
        key: its name in a torch_dist checkpoint; all layers lie under one key, along a first dimension.
        parts: Hugging Face's names for what it is made of, with their shapes.
        groups: blocks of rows; each block has the rows of each part that belong to it.
        layer: number of the layer; ``None``: the weight is the whole model's.
        is_vocabulary: whether rows are tokens, which Megatron pads to a multiple.
    """

    key: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    groups: int = 1
    layer: int | None = None
    is_vocabulary: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of Megatron's tensor, without padding and without the dimension of layers."""
        rows = sum(shape[0] for _, shape in self.parts)
        return (rows, *self.parts[0][1][1:])

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return Megatron's tensor, joined from its parts in their order."""
        blocks = [part.unflatten(0, (self.groups, -1)) for part in parts]
        return torch.cat(blocks, dim=1).flatten(0, 1)

    def split(self, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split Megatron's tensor into copies of its parts, by name; padding rows are dropped."""
        rows = [shape[0] // self.groups for _, shape in self.parts]
        blocks = joined[: self.shape[0]].unflatten(0, (self.groups, -1)).split(rows, dim=1)
        return {
            name: block.reshape(shape).clone()
            for (name, shape), block in zip(self.parts, blocks, strict=True)
        }


def weights_of(model: DenseModel) -> list[Weight]:
    """Return all weights of a model."""
    shapes = model.shapes
    hidden, vocabulary = (shapes.hidden_size,), (shapes.vocab_size, shapes.hidden_size)
    embedding = (("model.embed_tokens.weight", vocabulary),)
    weights = [Weight("embedding.word_embeddings.weight", embedding, is_vocabulary=True)]
    for layer in range(shapes.layers):
        weights += _layer(model, layer)
    weights.append(Weight("decoder.final_layernorm.weight", (("model.norm.weight", hidden),)))
    if not shapes.tied_embeddings:
        weights.append(Weight("output_layer.weight", (("lm_head.weight", vocabulary),), is_vocabulary=True))
    return weights


def _layer(model: DenseModel, layer: int) -> list[Weight]:
    shapes = model.shapes
    hidden, ffn, head = shapes.hidden_size, shapes.ffn_hidden_size, shapes.head_dim
    queries, keys = shapes.heads * head, shapes.kv_heads * head

    def weight(key: str, *parts: tuple[str, tuple[int, ...]], groups: int = 1) -> Weight:
        named = tuple((f"model.layers.{layer}.{name}", shape) for name, shape in parts)
        return Weight(f"decoder.layers.{key}", named, groups, layer)

    def qkv(kind: str, *columns: int) -> Weight:
        rows = {"q": queries, "k": keys, "v": keys}
        parts = [(f"self_attn.{name}_proj.{kind}", (count, *columns)) for name, count in rows.items()]
        return weight(f"self_attention.linear_qkv.{kind}", *parts, groups=shapes.kv_heads)

    weights = [
        weight("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight", (hidden,))),
        qkv("weight", hidden),
        weight("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", (hidden, queries))),
        weight("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight", (hidden,))),
        weight(
            "mlp.linear_fc1.weight",
            ("mlp.gate_proj.weight", (ffn, hidden)),
            ("mlp.up_proj.weight", (ffn, hidden)),
        ),
        weight("mlp.linear_fc2.weight", ("mlp.down_proj.weight", (hidden, ffn))),
    ]
    if shapes.biases or shapes.qkv_bias:
        weights.append(qkv("bias"))
    if shapes.biases:
        gate_and_up = [(f"mlp.{name}_proj.bias", (ffn,)) for name in ("gate", "up")]
        weights += [
            weight("self_attention.linear_proj.bias", ("self_attn.o_proj.bias", (hidden,))),
            weight("mlp.linear_fc1.bias", *gate_and_up),
            weight("mlp.linear_fc2.bias", ("mlp.down_proj.bias", (hidden,))),
        ]
    if shapes.qk_norm:
        weights += [
            weight(f"self_attention.{name}_layernorm.weight", (f"self_attn.{name}_norm.weight", (head,)))
            for name in ("q", "k")
        ]
    return weights
