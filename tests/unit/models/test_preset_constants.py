"""Presets are the published models: shapes, constants and the lines printed for them."""

from __future__ import annotations

import json

import pytest

from megatron_hexi.models import constant_flags, model_flags, read_model

_USUAL = {
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_LLAMA3 = _USUAL | {
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "vocab_size": 128256,
}
_QWEN3 = _USUAL | {
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}
#: config.json of each model, from the page that its preset names as its source.
PUBLISHED = {
    "llama3-8b": _LLAMA3
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "llama3-70b": _LLAMA3
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "qwen3-8b": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36},
    "qwen3-32b": _QWEN3
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_model(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name]))
    assert spelt(constant_flags(name)) == spelt(constant_flags(path))
    assert model_flags(read_model(name), 8192) == model_flags(read_model(path), 8192)


def spelt(flags: list[str]) -> dict[str, float]:
    """Flags and their values, as numbers."""
    return dict(zip(flags[::2], map(float, flags[1::2]), strict=True))


@pytest.mark.parametrize("name", ["gpt-3b", "gpt-7b", "gpt-13b", "gpt-70b"])
def test_gpt_3_has_the_epsilon_of_gpt_2(name):
    """GPT-3 has the architecture of GPT-2 (arXiv 2005.14165, section 2.1), whose epsilon is 1e-5."""
    assert spelt(constant_flags(name)) == {"--norm-epsilon": 1e-05}
