"""Specifications of a hybrid model's layers, and of a GPT's delta nets, without Transformer Engine."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_submodules,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

#: The layer of a gated delta net.
DELTA_NET = ModuleSpec(
    module=GatedDeltaNet,
    submodules=GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    ),
)


def hybrid_stack(original: ModuleSpec) -> ModuleSpec:
    """Return Megatron's specification of a hybrid model's layers, those that train on a CPU in PyTorch.

    Args:
        original: Megatron's own; its layers of other kinds are kept, and fail without Transformer Engine.
    """
    layer = get_gpt_layer_local_submodules(normalization="RMSNorm")
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=layer.mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=get_moe_module_spec(use_te=False, num_experts=1),  # the configuration says how many
        mlp_bda=get_bias_dropout_add,
    )
    submodules = replace(
        original.submodules,
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
        gdn_layer=_attention_layer(DELTA_NET, "in_proj"),
        attention_layer=_attention_layer(layer.self_attention, "linear_qkv"),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
    )
    return replace(original, submodules=submodules)


def delta_net_block(
    config: Any, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage of a GPT with delta nets.

    Args:
        config: Megatron's configuration of the transformer; its `linear_attention_freq` says which layers
            are delta nets.
        pp_rank: the stage; ``None``: this rank's.
    """
    usual = copy.copy(config)
    usual.experimental_attention_variant = None  # which the next function refuses
    layers = get_gpt_decoder_layer_specs(
        usual, use_transformer_engine=False, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        numbers = layout.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank)
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank))
    pattern = get_linear_attention_pattern(config)
    chosen = [_with_delta_net(layers[number]) if pattern[number] else layers[number] for number in numbers]
    return TransformerBlockSubmodules(layer_specs=chosen, layer_norm=WrappedTorchNorm)


def _attention_layer(attention: Any, projection: str) -> ModuleSpec:
    submodules = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=_fused_norm(projection),
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _with_delta_net(layer: ModuleSpec) -> ModuleSpec:
    keys = layer.submodules.sharded_state_dict_keys_map | _fused_norm("in_proj")
    submodules = replace(layer.submodules, self_attention=DELTA_NET, sharded_state_dict_keys_map=keys)
    return replace(layer, submodules=submodules)


def _fused_norm(projection: str) -> dict[str, str]:
    """Return the name that a norm before a projection has in checkpoints: Transformer Engine fuses both."""
    return {"input_layernorm.": f"self_attention.{projection}.layer_norm_"}
