"""The table of weights: the Hugging Face tensors that each tensor of Megatron's checkpoint is made of.

Megatron joins what it multiplies in one step. Queries, keys and values lie by KV group: the queries of a
group, its key, its value, then the next group; so a tensor-parallel rank's part is one block of rows. Gate
and up lie one after the other. Both formats rotate halves of a head (Megatron without
``--rotary-interleaved``), and neighbours in latent attention: no rows move inside a head.

Transformer Engine's layers hold the norm before them, where Megatron's own have it beside them; such a norm
has two names, and checkpoints are written with both.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import singledispatch

from megatron_hexi.convert.config import ConvertedModel
from megatron_hexi.convert.expert_weights import expert_weights
from megatron_hexi.convert.parts import CheckpointLayer, Weight, dense_mlp
from megatron_hexi.kinds import Experts, Latent
from megatron_hexi.kinds.attention import SoftmaxAttention
from megatron_hexi.kinds.part import LayerPart

_NORM_IN_MLP = "mlp.linear_fc1.layer_norm_weight"
_NORM_BESIDE = "pre_mlp_layernorm.weight"
#: Other names of the norm before an MLP and before experts, by the layer's attention: Megatron's own
#: specification maps names where attention is plain, and not where it is latent.
_OTHER_NORMS = {SoftmaxAttention: ("", _NORM_IN_MLP), Latent: (_NORM_BESIDE, "")}


def weights_of(
    model: ConvertedModel, found: Collection[str] = (), keys_by_layer: bool | None = None
) -> list[Weight]:
    """Return all weights of a model.

    Args:
        found: names of the Hugging Face tensors that there are; experts that lie in one of them are taken
            from it. Without: the names of published models.
        keys_by_layer: whether each layer has keys of its own in Megatron's checkpoint; ``None``: where its
            layers differ in their MLP, as Megatron has it.
    """
    shapes = model.shapes
    if keys_by_layer is None:
        keys_by_layer = len({type(kind.feed_forward) for kind in shapes.kinds}) > 1
    hidden, vocabulary = (shapes.hidden_size,), (shapes.vocab_size, shapes.hidden_size)
    embedding = (("model.embed_tokens.weight", vocabulary),)
    weights = [Weight("embedding.word_embeddings.weight", embedding, is_vocabulary=True)]
    for number, kind in enumerate(shapes.kind_of_layers):
        layer = CheckpointLayer(model, shapes.kinds[kind], number, keys_by_layer)
        weights += _mixer(layer.shapes.mixer, layer)
        weights += _feed_forward(layer.shapes.feed_forward, layer, found)
    weights.append(Weight("decoder.final_layernorm.weight", (("model.norm.weight", hidden),)))
    if not shapes.tied_embeddings:
        weights.append(Weight("output_layer.weight", (("lm_head.weight", vocabulary),), is_vocabulary=True))
    return weights


@singledispatch
def _mixer(attention: LayerPart, layer: CheckpointLayer) -> list[Weight]:
    """Return the weights of attention, or of what stands in its place, and of the norm before it."""
    del attention
    shapes = layer.shapes
    hidden, head = shapes.hidden_size, shapes.head_dim
    queries, keys = shapes.heads * head, shapes.kv_heads * head

    def qkv(kind: str, *columns: int) -> Weight:
        rows = {"q": queries, "k": keys, "v": keys}
        parts = [(f"self_attn.{name}_proj.{kind}", (count, *columns)) for name, count in rows.items()]
        return layer.weight(f"self_attention.linear_qkv.{kind}", *parts, groups=shapes.kv_heads)

    weights = [
        layer.weight("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight", (hidden,))),
        qkv("weight", hidden),
        layer.weight("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", (hidden, queries))),
    ]
    if shapes.biases or shapes.qkv_bias:
        weights.append(qkv("bias"))
    if shapes.biases:
        weights.append(layer.weight("self_attention.linear_proj.bias", ("self_attn.o_proj.bias", (hidden,))))
    if shapes.qk_norm:
        weights += [
            layer.weight(
                f"self_attention.{name}_layernorm.weight", (f"self_attn.{name}_norm.weight", (head,))
            )
            for name in ("q", "k")
        ]
    if shapes.sinks:
        sinks = ("self_attn.sinks", (shapes.heads,))
        weights.append(layer.weight("self_attention.core_attention.softmax_offset", sinks))
    return weights


@_mixer.register(Latent)
def _(latent: Latent, layer: CheckpointLayer) -> list[Weight]:
    shapes = layer.shapes
    hidden, queries = shapes.hidden_size, shapes.heads * shapes.head_dim
    values = shapes.heads * latent.value_dim
    expanded = queries - shapes.heads * latent.rotary_dim + values

    def linear(key: str, name: str, rows: int, columns: int) -> Weight:
        return layer.weight(f"self_attention.{key}.weight", (f"self_attn.{name}.weight", (rows, columns)))

    def norm(of: str, name: str, width: int) -> Weight:
        return layer.weight(
            f"self_attention.{of}_layernorm.weight",
            (f"self_attn.{name}.weight", (width,)),
            same_as=f"self_attention.linear_{of}_up_proj.layer_norm_weight",
        )

    weights = [
        layer.weight("input_layernorm.weight", ("input_layernorm.weight", (hidden,))),
        linear("linear_kv_down_proj", "kv_a_proj_with_mqa", latent.kv_rank + latent.rotary_dim, hidden),
        norm("kv", "kv_a_layernorm", latent.kv_rank),
        linear("linear_kv_up_proj", "kv_b_proj", expanded, latent.kv_rank),
        linear("linear_proj", "o_proj", hidden, values),
    ]
    if latent.query_rank is None:
        return [*weights, linear("linear_q_proj", "q_proj", queries, hidden)]
    return [
        *weights,
        linear("linear_q_down_proj", "q_a_proj", latent.query_rank, hidden),
        norm("q", "q_a_layernorm", latent.query_rank),
        linear("linear_q_up_proj", "q_b_proj", queries, latent.query_rank),
    ]


@singledispatch
def _feed_forward(mlp: LayerPart, layer: CheckpointLayer, found: Collection[str]) -> list[Weight]:
    """Return the weights of an MLP, or of experts, and of the norm before it."""
    del mlp, found
    norm = _norm(layer, _NORM_IN_MLP, _OTHER_NORMS[type(layer.shapes.mixer)][0])
    return [norm, *dense_mlp(layer, "mlp", "mlp", layer.shapes.ffn_hidden_size)]


@_feed_forward.register(Experts)
def _(experts: Experts, layer: CheckpointLayer, found: Collection[str]) -> list[Weight]:
    norm = _norm(layer, _NORM_BESIDE, _OTHER_NORMS[type(layer.shapes.mixer)][1])
    return [norm, *expert_weights(experts, layer, found)]


def _norm(layer: CheckpointLayer, key: str, same_as: str) -> Weight:
    width = (layer.shapes.hidden_size,)
    return layer.weight(key, ("post_attention_layernorm.weight", width), same_as=same_as)
