"""For ``--spec tests.megatron.delta_spec block``: a GPT with delta nets, without Transformer Engine.

Megatron specifies these layers with Transformer Engine only.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tests.megatron.hybrid_spec import delta_net


def block(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of a pipeline stage, as ``--linear-attention-freq`` says.

    Args:
        config: Megatron's configuration of a GPT.
        vp_stage: the virtual stage.
    """
    transformer = config.transformer
    usual = copy.copy(transformer)
    usual.experimental_attention_variant = None  # which that function refuses
    spec = get_gpt_decoder_block_spec(
        usual, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    first = get_transformer_layer_offset(transformer, vp_stage)
    pattern = get_linear_attention_pattern(transformer)[first:]
    layers = [
        replace(layer, submodules=replace(layer.submodules, self_attention=delta_net)) if linear else layer
        for layer, linear in zip(spec.layer_specs, pattern, strict=False)
    ]
    return replace(spec, layer_specs=layers)
