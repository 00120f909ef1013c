"""Weights of a layer with experts: router, routed experts, shared ones.

Megatron keeps the routed experts of a layer along one dimension, whether it multiplies them one by one
(SequentialMLP) or in groups (TEGroupedMLP). Published files have a tensor for each expert's matrix;
transformers 5 joins them in memory: gate and up behind each other. gpt-oss alone is published joined, with
inputs before outputs and the columns of gate and up in turn.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from megatron_hexi.convert.parts import CheckpointLayer, Weight, dense_mlp
from megatron_hexi.kinds import Experts

#: Names of an expert's gate, up and down matrices.
_MATRICES = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_MATRICES = ("w1", "w3", "w2")
#: Those of all experts of a layer, where they lie in one tensor.
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
#: Megatron's names of both.
_FIRST, _SECOND = "mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"


def expert_weights(experts: Experts, layer: CheckpointLayer, found: Collection[str]) -> list[Weight]:
    """Return the weights of a layer's router and experts.

    Args:
        found: names of the Hugging Face tensors that there are; without any, those of published models.
    """
    count, hidden = experts.count, layer.shapes.hidden_size
    if layer.model.model_type == "gpt_oss":
        return [
            layer.weight("mlp.router.weight", ("mlp.router.weight", (count, hidden))),
            layer.weight("mlp.router.bias", ("mlp.router.bias", (count,))),
            *_interleaved_experts(layer, experts),
        ]
    is_joined = f"model.layers.{layer.number}.mlp.experts.gate_up_proj" in found
    is_mixtral = layer.model.model_type == "mixtral" and not is_joined
    block = "block_sparse_moe" if is_mixtral else "mlp"
    weights = [layer.weight("mlp.router.weight", (f"{block}.gate.weight", (count, hidden)))]
    if experts.score_bias:
        bias = (f"{block}.gate.e_score_correction_bias", (count,))
        weights.append(layer.weight("mlp.router.expert_bias", bias))
    if is_joined:
        weights += _joined_experts(layer, experts)
    else:
        weights += _single_experts(layer, experts, block, _MIXTRAL_MATRICES if is_mixtral else _MATRICES)
    if experts.shared_ffn_hidden_size:
        shared = "mlp.shared_experts"
        weights += dense_mlp(layer, shared, shared, experts.shared_ffn_hidden_size)
    return weights


def _single_experts(
    layer: CheckpointLayer, experts: Experts, block: str, names: tuple[str, str, str]
) -> list[Weight]:
    hidden, width, numbers = layer.shapes.hidden_size, experts.ffn_hidden_size, range(experts.count)
    gate, up, down = names
    first = [
        (f"{block}.experts.{number}.{matrix}.weight", (width, hidden))
        for number in numbers
        for matrix in (gate, up)
    ]
    second = [(f"{block}.experts.{number}.{down}.weight", (hidden, width)) for number in numbers]
    return [
        layer.weight(f"{_FIRST}.weight", *first, experts=experts.count),
        layer.weight(f"{_SECOND}.weight", *second, experts=experts.count),
    ]


def _joined_experts(layer: CheckpointLayer, experts: Experts) -> list[Weight]:
    hidden, count, width = layer.shapes.hidden_size, experts.count, experts.ffn_hidden_size
    joined = partial(layer.weight, experts=count, is_joined=True)
    return [
        joined(f"{_FIRST}.weight", (_GATE_UP, (count, 2 * width, hidden))),
        joined(f"{_SECOND}.weight", (_DOWN, (count, hidden, width))),
    ]


def _interleaved_experts(layer: CheckpointLayer, experts: Experts) -> list[Weight]:
    hidden, count, width = layer.shapes.hidden_size, experts.count, experts.ffn_hidden_size
    joined = partial(layer.weight, experts=count, is_joined=True)
    in_turn = partial(joined, is_interleaved=True)
    return [
        in_turn(f"{_FIRST}.weight", (_GATE_UP, (count, hidden, 2 * width)), is_transposed=True),
        in_turn(f"{_FIRST}.bias", (f"{_GATE_UP}_bias", (count, 2 * width))),
        joined(f"{_SECOND}.weight", (_DOWN, (count, width, hidden)), is_transposed=True),
        joined(f"{_SECOND}.bias", (f"{_DOWN}_bias", (count, hidden))),
    ]
