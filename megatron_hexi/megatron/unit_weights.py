"""A table of how the ranks of a tensor-parallel unit hold each weight of a model, and its gradient.

Megatron marks the weights whose gradients it sums over these ranks, and some marks are missing or wrong
(`docs/stages.md`). Under a plan the table below decides instead. Its test compares the gradients of two
ranks, before any sum, with those of one rank (`tests/megatron/test_unit_weights.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Module, Parameter

from megatron_hexi.errors import PlanError, user_errors
from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import patched
from megatron_hexi.runtime.bucket_buffer import main_grad


class Holding(Enum):
    """Ways in which the ranks of a unit hold a weight: in parts (`SPLIT`), or whole on each rank."""

    #: Each rank holds rows, columns or experts of its own, with their gradient.
    SPLIT = "split"
    #: The gradient is from the rank's own rows: a part under sequence parallelism, else all of it.
    ROWS = "rows"
    #: The gradient is the part from the rank's own heads.
    HEADS = "heads"
    #: Each rank has the whole gradient.
    COPY = "copy"

    def is_part(self, sequence_parallel: bool) -> bool:
        """Whether ranks that all hold the weight have a part of its gradient each."""
        return self is Holding.HEADS or (self is Holding.ROWS and sequence_parallel)


#: By the class of a layer, the names of its weights, without numbers of layers and experts; ``*`` stands for
#: weight and bias. A prefix restricts a name to Megatron's own linear layers and norms (``local:``) or to
#: Transformer Engine's (``te:``).
TABLE: dict[str, dict[Holding, str]] = {
    "LanguageModule": {
        Holding.SPLIT: "embedding.word_embeddings.weight output_layer.weight",
        Holding.COPY: "embedding.position_embeddings.weight",
        Holding.ROWS: "decoder.final_layernorm.* decoder.final_norm.*",
    },
    "MultiTokenPredictionLayer": {
        Holding.SPLIT: "eh_proj.weight",
        Holding.ROWS: "enorm.* hnorm.* final_layernorm.*",
    },
    "TransformerLayer": {Holding.ROWS: "input_layernorm.* pre_mlp_layernorm.*"},
    "SelfAttention": {
        Holding.SPLIT: "linear_qkv.* linear_proj.weight core_attention.softmax_offset",
        Holding.ROWS: "linear_proj.bias te:linear_qkv.layer_norm_*",
        Holding.HEADS: "q_layernorm.* k_layernorm.*",
    },
    "MLASelfAttention": {
        Holding.SPLIT: "linear_q_proj.weight linear_q_up_proj.weight linear_kv_up_proj.weight "
        "local:linear_q_down_proj.weight local:linear_kv_down_proj.weight te:linear_qkv_down_proj.weight "
        "core_attention.softmax_offset linear_proj.weight",
        Holding.ROWS: "linear_proj.bias local:q_layernorm.* local:kv_layernorm.* "
        "te:linear_q_down_proj.weight te:linear_kv_down_proj.weight te:linear_qkv_down_proj.layer_norm_* "
        "te:linear_q_up_proj.layer_norm_* te:linear_kv_up_proj.layer_norm_*",
    },
    "MLP": {
        Holding.SPLIT: "linear_fc1.* linear_fc2.weight",
        Holding.ROWS: "linear_fc2.bias te:linear_fc1.layer_norm_*",
    },
    "MoELayer": {
        Holding.SPLIT: "experts.local_experts.linear_fc1.weight experts.local_experts.linear_fc2.weight "
        "te:experts.linear_fc1.* te:experts.linear_fc2.*",
        Holding.ROWS: "router.* shared_experts.gate_weight",
    },
    "MambaLayer": {Holding.ROWS: "norm.*"},
    "MambaMixer": {
        Holding.SPLIT: "in_proj.weight out_proj.weight norm.weight conv1d_weight conv1d_bias A_log D dt_bias",
        Holding.ROWS: "te:in_proj.layer_norm_*",
    },
    "GatedDeltaNet": {
        Holding.SPLIT: "in_proj.weight out_proj.weight conv1d.weight A_log dt_bias",
        Holding.ROWS: "te:in_proj.layer_norm_*",
        Holding.HEADS: "out_norm.*",
    },
    "ShortConvMixer": {
        Holding.SPLIT: "in_proj.weight out_proj.weight conv_weight",
        Holding.ROWS: "te:in_proj.layer_norm_*",
    },
    "Qwen3VLVisionPatchMerger": {Holding.SPLIT: "linear_fc1.* linear_fc2.weight"},
    # Megatron Bridge's LoRA. DoRA's magnitudes are missing: Bridge makes them of a rank's part of a weight.
    "ParallelLinearAdapter": {Holding.SPLIT: "linear_in.weight linear_out.weight"},
}

#: The table by layer and name, without `*`.
HOLDINGS = {
    (layer, pattern.replace("*", leaf)): holding
    for layer, patterns in TABLE.items()
    for holding, words in patterns.items()
    for pattern in words.split()
    for leaf in ("weight", "bias")
}
#: Models by class, with their encoders: each rank of a unit sees all rows of the unit's images, so it has the
#: whole gradient of each weight that is not split.
ENCODERS = {("Qwen25VLModel", "visual"), ("Qwen3VLModel", "vision_model")}
#: The number of a layer or of an expert, inside a name or, of grouped experts, at its end.
_NUMBER = re.compile(r"\.\d+(?=\.)|\d+$")


def holdings(model: Module) -> dict[Parameter, Holding]:
    """Return how the ranks of a unit hold each trained weight of a model.

    Raises:
        PlanError: a weight is not in the table.
    """
    modules = dict(model.named_modules())
    return {
        parameter: _holding(modules, name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _holding(modules: dict[str, Module], name: str) -> Holding:
    parts = name.split(".")
    is_te = "transformer_engine" in type(modules[".".join(parts[:-1])]).__module__
    sees_all = False
    for start in range(len(parts)):  # from the model to the layer: an expert's MLP is the expert layer's
        inside = _NUMBER.sub("", ".".join(parts[start:]))
        for base in type(modules[".".join(parts[:start])]).__mro__:
            sees_all |= (base.__name__, parts[start]) in ENCODERS
            for spelled in (inside, f"{'te' if is_te else 'local'}:{inside}"):
                if (base.__name__, spelled) in HOLDINGS:
                    found = HOLDINGS[base.__name__, spelled]
                    return Holding.COPY if sees_all and found is not Holding.SPLIT else found
    if sees_all:
        return Holding.COPY
    raise unknown(name)


def unknown(name: str) -> PlanError:
    """Return the error for a weight that the table lacks, or that a model holds otherwise."""
    return PlanError(
        f"parameter {name}: it is not known how the ranks of a tensor-parallel unit hold this weight and its "
        "gradient; train its layer on units of one rank"
    )


@patched(
    "megatron.core.optimizer:get_megatron_optimizer",
    why="refuses weights of which it is not known how tensor-parallel ranks hold them",
)
def _with_known_weights(
    original: Callable[..., Any], config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any
) -> Any:
    session = active_session()
    is_unit = parallel_state.get_tensor_model_parallel_world_size() > 1
    if session is not None and session.stages is None and is_unit:
        with user_errors():
            for chunk in model_chunks:
                chunk.unit_holdings = holdings(chunk.module)
    return original(config, model_chunks, *args, **kwargs)


@patched(
    "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
    why="sums gradients over tensor-parallel ranks where each has a part, whatever Megatron marks",
)
def _by_the_table(original: Callable[..., None], model: list[Any], config: Any, tp_group: Any = None) -> None:
    if active_session() is None:
        return original(model, config, tp_group)
    gradients = [
        main_grad(parameter)
        for chunk in model
        for parameter, holding in getattr(chunk, "unit_holdings", {}).items()
        if holding.is_part(config.sequence_parallel)
    ]
    if gradients:
        flat: Tensor = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=tp_group or parallel_state.get_tensor_model_parallel_group())
        for gradient, total in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(total)


UNIT_WEIGHT_PATCHES = (_with_known_weights, _by_the_table)
