"""Values that config.json files of published models have in common."""

from __future__ import annotations

from typing import Any

USUAL = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0",
    "use_cache": True,
}


def decoder_sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


def without(values: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {field: value for field, value in values.items() if field not in fields}
