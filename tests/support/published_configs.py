"""Values of config.json files of published models, by model."""

from __future__ import annotations

from typing import Any

from tests.support.published_experts import EXPERTS
from tests.support.published_hybrids import HYBRIDS
from tests.support.published_vision import VISION
from tests.support.published_windows import WINDOWED

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "use_cache": True}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _decoder(
    model_type: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type]
    usual = {
        "architectures": [f"{name}ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5 if name in ("Llama", "Mistral") else 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.40.1",
        **_TOKENS,
    }
    sizes = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }
    return usual | sizes | more


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    usual = {"max_position_embeddings": 4096, "pretraining_tp": 1, "rope_scaling": None}
    return _decoder("llama", *sizes, **usual | more)


def _mistral(*sizes: int, **more: Any) -> dict[str, Any]:
    usual = {"max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None}
    return _decoder("mistral", *sizes, **usual | more)


def _qwen(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    usual = {
        "max_position_embeddings": 131072,
        "max_window_layers": sizes[2],
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
    }
    return _decoder(model_type, *sizes, **usual | more)


def _qwen3(*sizes: int, **more: Any) -> dict[str, Any]:
    usual = {"head_dim": 128, "attention_bias": False, "sliding_window": None, "rope_scaling": None}
    return _qwen("qwen3", *sizes, **usual | more)


def _gpt2(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": width,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
        **more,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "Llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "Llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "CodeLlama-7b": _llama(4096, 11008, 32, 32, 32, 32016, rope_theta=1000000),
    "CodeLlama-34b": _llama(8192, 22016, 48, 64, 8, 32000, rope_theta=1000000),
    "Llama-3-8B": _llama(4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0),
    "Llama-3.1-70B": _llama(
        8192, 28672, 80, 64, 8, 128256, rope_theta=500000.0, rope_scaling=_LLAMA3_ROPE, mlp_bias=False
    ),
    "Llama-3.2-1B": _llama(
        *(2048, 8192, 16, 32, 8, 128256),
        head_dim=64,
        rope_theta=500000.0,
        rope_scaling=_LLAMA3_ROPE | {"factor": 32.0},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        max_position_embeddings=131072,
    ),
    "TinyLlama-1.1B": _llama(2048, 5632, 22, 32, 4, 32000, max_position_embeddings=2048),
    "SmolLM2-135M": _llama(
        *(576, 1536, 30, 9, 3, 49152),
        initializer_range=0.041666666666666664,
        is_llama_config=True,
        rope_interleaved=False,
        rope_theta=100000,
        tie_word_embeddings=True,
    ),
    "SmolLM2-1.7B": _llama(2048, 8192, 24, 32, 32, 49152, rope_theta=130000, tie_word_embeddings=True),
    "Yi-6B": _llama(4096, 11008, 32, 32, 4, 64000, rope_theta=5000000.0, pad_token_id=0),
    "Yi-34B": _llama(7168, 20480, 60, 56, 8, 64000, rope_theta=5000000.0, pad_token_id=0),
    "deepseek-coder-1.3b": _llama(
        *(2048, 5504, 24, 16, 16, 32256),
        max_position_embeddings=16384,
        rope_scaling={"factor": 4.0, "type": "linear"},
        rope_theta=100000,
        rms_norm_eps=1e-6,
    ),
    "deepseek-coder-33b": _llama(7168, 19200, 62, 56, 8, 32256, rope_theta=100000, rms_norm_eps=1e-6),
    "granite-3b-code": _llama(
        2560, 10240, 32, 32, 32, 49152, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "granite-8b-code": _llama(
        *(4096, 14336, 36, 32, 8, 49152),
        attention_bias=True,
        mlp_bias=True,
        rope_theta=10000000,
        tie_word_embeddings=True,
    ),
    "Mistral-7B-v0.3": _mistral(4096, 14336, 32, 32, 8, 32768),
    "Mistral-7B-v0.1": _mistral(4096, 14336, 32, 32, 8, 32000, rope_theta=10000.0, sliding_window=4096),
    "Mistral-Nemo-12B": _mistral(5120, 14336, 40, 32, 8, 131072, head_dim=128),
    "Qwen2-0.5B": _qwen("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "Qwen2-7B": _qwen("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-3B": _qwen("qwen2", 2048, 11008, 36, 16, 2, 151936, tie_word_embeddings=True),
    "Qwen2.5-14B": _qwen("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "Qwen2.5-72B": _qwen("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "R1-Distill-Qwen-1.5B": _qwen("qwen2", 1536, 8960, 28, 12, 2, 151936, rope_theta=10000),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, 151936, tie_word_embeddings=True, rope_theta=5000000),
    "Qwen3-8B with YaRN": _qwen3(
        *(4096, 12288, 36, 32, 8, 151936),
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8, 151936),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8, 151936),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16, n_special=0, predict_special_tokens=True),
    "gpt2-xl": _gpt2(1600, 48, 25, output_past=True),
    "distilgpt2": _gpt2(768, 6, 12, _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}),
    **EXPERTS,
    **WINDOWED,
    **HYBRIDS,
    **VISION,
}
