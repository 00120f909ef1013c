"""Values of config.json files of published models with windows or chunks, by model.

Each is on the model's page, https://huggingface.co/ and its key.
"""

from __future__ import annotations

from typing import Any

from tests.support.published_text import USUAL, decoder_sizes, without


def _gemma_text(**more: Any) -> dict[str, Any]:
    """A text model of its own, whose file has all fields."""
    return {
        **without(USUAL, "hidden_act", "tie_word_embeddings"),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        **more,
    }


def _gemma(**text: Any) -> dict[str, Any]:
    """A model with vision, whose text_config has what is not transformers' default."""
    scaling = {"factor": 8.0, "rope_type": "linear"}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text",
            "rope_scaling": scaling,
            "sliding_window": 1024,
            **text,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
    }


def _phi3(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        **USUAL,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        **decoder_sizes(*sizes),
        **more,
    }


def _longrope(columns: int) -> dict[str, Any]:
    """A scaling of as many frequencies; transformers counts the factors, weights do not depend on them."""
    return {"type": "longrope", "short_factor": [1.0] * columns, "long_factor": [2.0] * columns}


_LONG = {"max_position_embeddings": 131072, "sliding_window": 262144}

WINDOWED: dict[str, dict[str, Any]] = {
    "google/gemma-3-270m": _gemma_text(**decoder_sizes(640, 2048, 18, 4, 1, 262144)),
    "google/gemma-3-1b-pt": _gemma_text(**decoder_sizes(1152, 6912, 26, 4, 1, 262144)),
    "google/gemma-3-4b-pt": _gemma(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "google/gemma-3-12b-pt": _gemma(
        hidden_size=3840,
        intermediate_size=15360,
        num_attention_heads=16,
        num_hidden_layers=48,
        num_key_value_heads=8,
    ),
    "google/gemma-3-27b-pt": _gemma(
        head_dim=128,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_hidden_layers=62,
        num_key_value_heads=16,
        query_pre_attn_scalar=168,
    ),
    "microsoft/Phi-3-mini-4k-instruct": _phi3(3072, 8192, 32, 32, 32, 32064),
    "microsoft/Phi-3-mini-128k-instruct": _phi3(
        3072, 8192, 32, 32, 32, 32064, rope_scaling=_longrope(48), **_LONG
    ),
    "microsoft/Phi-3-medium-4k-instruct": _phi3(5120, 17920, 40, 40, 10, 32064),
    "microsoft/Phi-4": without(
        _phi3(
            *(5120, 17920, 40, 40, 10, 100352),
            max_position_embeddings=16384,
            original_max_position_embeddings=16384,
            rope_theta=250000,
            sliding_window=None,
        ),
        "auto_map",
    ),
    "microsoft/Phi-4-mini-instruct": _phi3(
        *(3072, 8192, 32, 24, 8, 200064),
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        mlp_bias=False,
        partial_rotary_factor=0.75,
        rope_scaling=_longrope(48),
        tie_word_embeddings=True,
        **_LONG,
    ),
}
