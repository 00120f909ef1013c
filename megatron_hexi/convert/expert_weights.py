"""Weights of a layer with experts: router, routed experts, shared ones.

Megatron keeps the routed experts of a layer along one dimension, whether it multiplies them one by one
(SequentialMLP) or in groups (TEGroupedMLP). Published files have a tensor for each expert's matrix;
transformers 5 joins them in memory: gate and up behind each other. gpt-oss alone is published joined, with
inputs before outputs and the columns of gate and up in turn.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_hexi.convert.layers import CheckpointLayer, dense_mlp
from megatron_hexi.convert.parts import Weight

#: Names of an expert's gate, up and down matrices.
_MATRICES = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_MATRICES = ("w1", "w3", "w2")


def has_experts(layer: CheckpointLayer) -> bool:
    """Whether the layer has experts in place of a dense MLP."""
    experts = layer.model.shapes.experts
    return experts is not None and (not experts.layers or experts.layers[layer.number])


def expert_weights(layer: CheckpointLayer, found: Collection[str]) -> list[Weight]:
    """Return the weights of a layer's router and experts.

    Args:
        found: names of the Hugging Face tensors that there are; without any, those of published models.
    """
    experts = layer.model.shapes.experts
    assert experts is not None
    if layer.model.model_type == "gpt_oss":
        return _interleaved_experts(layer)
    is_joined = f"model.layers.{layer.number}.mlp.experts.gate_up_proj" in found
    is_mixtral = layer.model.model_type == "mixtral" and not is_joined
    block = "block_sparse_moe" if is_mixtral else "mlp"
    shape = (experts.count, layer.model.shapes.hidden_size)
    weights = [layer.weight("mlp.router.weight", (f"{block}.gate.weight", shape))]
    if experts.score_bias:
        bias = (f"{block}.gate.e_score_correction_bias", (experts.count,))
        weights.append(layer.weight("mlp.router.expert_bias", bias))
    if is_joined:
        weights += _joined_experts(layer)
    else:
        weights += _single_experts(layer, block, _MIXTRAL_MATRICES if is_mixtral else _MATRICES)
    if experts.shared_ffn_hidden_size:
        weights += dense_mlp(
            layer, "mlp.shared_experts", "mlp.shared_experts", experts.shared_ffn_hidden_size
        )
    return weights


def _single_experts(layer: CheckpointLayer, block: str, names: tuple[str, str, str]) -> list[Weight]:
    experts, hidden = layer.model.shapes.experts, layer.model.shapes.hidden_size
    assert experts is not None
    width, numbers = experts.ffn_hidden_size, range(experts.count)
    gate, up, down = names
    first = [
        (f"{block}.experts.{number}.{matrix}.weight", (width, hidden))
        for number in numbers
        for matrix in (gate, up)
    ]
    second = [(f"{block}.experts.{number}.{down}.weight", (hidden, width)) for number in numbers]
    return [
        layer.weight("mlp.experts.experts.linear_fc1.weight", *first, experts=experts.count),
        layer.weight("mlp.experts.experts.linear_fc2.weight", *second, experts=experts.count),
    ]


def _joined_experts(layer: CheckpointLayer) -> list[Weight]:
    experts, hidden = layer.model.shapes.experts, layer.model.shapes.hidden_size
    assert experts is not None
    count, width = experts.count, experts.ffn_hidden_size
    first = ("mlp.experts.gate_up_proj", (count, 2 * width, hidden))
    second = ("mlp.experts.down_proj", (count, hidden, width))
    return [
        layer.weight("mlp.experts.experts.linear_fc1.weight", first, experts=count, is_joined=True),
        layer.weight("mlp.experts.experts.linear_fc2.weight", second, experts=count, is_joined=True),
    ]


def _interleaved_experts(layer: CheckpointLayer) -> list[Weight]:
    experts, hidden = layer.model.shapes.experts, layer.model.shapes.hidden_size
    assert experts is not None
    count, width = experts.count, experts.ffn_hidden_size
    first, second = "mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    return [
        layer.weight("mlp.router.weight", ("mlp.router.weight", (count, hidden))),
        layer.weight("mlp.router.bias", ("mlp.router.bias", (count,))),
        layer.weight(
            f"{first}.weight",
            (gate_up, (count, hidden, 2 * width)),
            experts=count,
            is_joined=True,
            is_transposed=True,
            is_interleaved=True,
        ),
        layer.weight(
            f"{first}.bias",
            (f"{gate_up}_bias", (count, 2 * width)),
            experts=count,
            is_joined=True,
            is_interleaved=True,
        ),
        layer.weight(
            f"{second}.weight",
            (down, (count, width, hidden)),
            experts=count,
            is_joined=True,
            is_transposed=True,
        ),
        layer.weight(f"{second}.bias", (f"{down}_bias", (count, hidden)), experts=count, is_joined=True),
    ]
