"""Fields of config.json that most decoders have, with transformers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hexi.models.hugging_face.fields import NEEDED, Only

ROTARY: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
}
DECODER: Mapping[str, Any] = {
    "architectures": None,
    "num_hidden_layers": NEEDED,
    "hidden_size": NEEDED,
    "intermediate_size": NEEDED,
    "num_attention_heads": NEEDED,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": NEEDED,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    **ROTARY,
}
SILU = Only(("silu", "swish"), "another activation in a gated MLP", "give a model with silu")
NO_BIAS = Only(
    (False,),
    "biases in some linear layers only, of which Megatron has those of queries, keys and values,",
    "give a model without",
)
NO_BIASES = {"attention_bias": NO_BIAS, "mlp_bias": NO_BIAS}
