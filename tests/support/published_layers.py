"""Values of config.json files of published models with experts, windows or latent attention, by model.

Each is from the model's page on huggingface.co, https://huggingface.co/NAME/blob/main/config.json.
"""

from __future__ import annotations

from typing import Any

_USUAL = {"attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}


def _sizes(
    model_type: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        **_USUAL,
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


def _mixtral(*sizes: int, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    }
    return _sizes("mixtral", *sizes, **usual | more)


def _qwen3_moe(*sizes: int, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "max_window_layers": sizes[2],
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return _sizes("qwen3_moe", *sizes, **usual | more)


def _deepseek(model_type: str, heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    }
    return _sizes(model_type, 7168, 18432, 61, heads, heads, vocab, **usual | more)


_KIMI_ROPE = {
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    more: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "output_router_logits": False,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    }
    return _sizes("gpt_oss", 2880, 2880, layers, 64, 8, 201088, **more)


def _glm(*sizes: int, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "topk_group": 1,
    }
    return _sizes("glm4_moe", *sizes, **usual | more)


def _gemma_with_vision(**text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **text,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
    }


def _gemma_text(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
        **more,
    }


def _llama4(**text: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "for_llm_compression": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "intermediate_size_mlp": 16384,
        "no_rope_layers": [],
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    }
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": _sizes("llama4_text", 5120, 8192, 48, 40, 8, 202048, **usual | text),
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
    }


def _phi(*sizes: int, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "attention_bias": False,
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    }
    return _sizes("phi3", *sizes, **usual | more)


#: By the name on huggingface.co.
PUBLISHED_LAYERS: dict[str, dict[str, Any]] = {
    "mistralai/Mixtral-8x7B-v0.1": _mixtral(4096, 14336, 32, 32, 8, 32000, max_position_embeddings=32768),
    "mistralai/Mixtral-8x22B-v0.1": _mixtral(
        *(6144, 16384, 56, 48, 8, 32768), max_position_embeddings=65536, router_aux_loss_coef=0.001
    ),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 6144, 48, 32, 4, 151936, moe_intermediate_size=768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536),
    "deepseek-ai/DeepSeek-V3": _deepseek("deepseek_v3", 128, 129280),
    "moonshotai/Kimi-K2-Instruct": _deepseek(
        *("kimi_k2", 64, 163840),
        first_k_dense_replace=1,
        max_position_embeddings=131072,
        n_group=1,
        n_routed_experts=384,
        num_nextn_predict_layers=0,
        rope_scaling=_KIMI_ROPE,
        rope_theta=50000.0,
        routed_scaling_factor=2.827,
        topk_group=1,
    ),
    "moonshotai/Moonlight-16B-A3B": _deepseek("deepseek_v3", 16, 163840)
    | {
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "quantization_config": None,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
    },
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "zai-org/GLM-4.5": _glm(
        *(5120, 12288, 92, 96, 8, 151552),
        first_k_dense_replace=3,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "zai-org/GLM-4.5-Air": _glm(
        *(4096, 10944, 46, 96, 8, 151552),
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "google/gemma-3-27b-it": _gemma_with_vision(
        head_dim=128,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_hidden_layers=62,
        num_key_value_heads=16,
        query_pre_attn_scalar=168,
    ),
    "google/gemma-3-12b-it": _gemma_with_vision(
        hidden_size=3840,
        intermediate_size=15360,
        num_attention_heads=16,
        num_hidden_layers=48,
        num_key_value_heads=8,
    ),
    "google/gemma-3-4b-it": _gemma_with_vision(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34
    ),
    "google/gemma-3-1b-it": _gemma_text(1152, 6912, 26, 4, 1),
    "google/gemma-3-270m": _gemma_text(640, 2048, 18, 4, 1),
    "meta-llama/Llama-4-Scout-17B-16E": _llama4(num_local_experts=16, interleave_moe_layer_step=1),
    "meta-llama/Llama-4-Maverick-17B-128E": _llama4(
        num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False
    ),
    "microsoft/Phi-3-mini-4k-instruct": _phi(3072, 8192, 32, 32, 32, 32064, sliding_window=2047),
    "microsoft/Phi-3-mini-128k-instruct": _phi(
        *(3072, 8192, 32, 32, 32, 32064),
        max_position_embeddings=131072,
        rope_scaling={"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        sliding_window=262144,
    ),
    "microsoft/Phi-3-medium-4k-instruct": _phi(5120, 17920, 40, 40, 10, 32064, sliding_window=2047),
    "microsoft/Phi-4-mini-instruct": _phi(
        *(3072, 8192, 32, 24, 8, 200064),
        eos_token_id=199999,
        pad_token_id=199999,
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        sliding_window=262144,
    ),
    "microsoft/phi-4": _phi(5120, 17920, 40, 40, 10, 100352, max_position_embeddings=16384, rope_theta=250000)
    | {"auto_map": None, "bos_token_id": 100257, "eos_token_id": 100257, "pad_token_id": 100257},
    "mistralai/Mistral-7B-v0.1": _sizes(
        *("mistral", 4096, 14336, 32, 32, 8, 32000),
        architectures=["MistralForCausalLM"],
        hidden_act="silu",
        max_position_embeddings=32768,
        rms_norm_eps=1e-05,
        rope_theta=10000.0,
        sliding_window=4096,
    ),
}

#: Weights without multi-token prediction and vision, with the bias of experts' loads, counted layer by layer
#: from the published sizes without this project's code; and active weights in billions, of which the input
#: embedding is none.
COUNTED = {
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, 12.75),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, 3.04),
    "Qwen/Qwen3-235B-A22B": (235_093_634_560, 21.57),
    "deepseek-ai/DeepSeek-V3": (671_026_419_200, 36.63),
    "moonshotai/Kimi-K2-Instruct": (1_026_408_232_448, 31.69),
    "openai/gpt-oss-20b": (20_914_757_184, 3.61),
    "openai/gpt-oss-120b": (116_829_156_672, 5.13),
    "google/gemma-3-27b-it": (27_009_346_304, 27.01),
    "meta-llama/Llama-4-Scout-17B-16E": (107_769_861_120, 16.14),
    "meta-llama/Llama-4-Maverick-17B-128E": (400_711_848_960, 16.15),
    "zai-org/GLM-4.5": (352_797_829_024, 32.86),
}
