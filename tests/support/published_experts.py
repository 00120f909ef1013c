"""Values of config.json files of published models with experts or latent attention, by model.

Each is on the model's page, https://huggingface.co/ and its key.
"""

from __future__ import annotations

from typing import Any

from tests.support.published_text import USUAL, decoder_sizes, without


def _mixtral(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        **without(USUAL, "attention_bias", "rope_scaling"),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 32768,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        **decoder_sizes(*sizes),
        **more,
    }


def _qwen3_moe(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        **USUAL,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "max_window_layers": sizes[2],
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
        **decoder_sizes(*sizes),
        **more,
    }


_DEEPSEEK_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


def _deepseek(*sizes: int, model_type: str = "deepseek_v3", **more: Any) -> dict[str, Any]:
    return {
        **USUAL,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": model_type,
        "auto_map": _DEEPSEEK_CODE,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
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
        "quantization_config": _FP8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": _DEEPSEEK_YARN,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        **decoder_sizes(*sizes),
        **more,
    }


def _kimi(**more: Any) -> dict[str, Any]:
    return _deepseek(
        *(7168, 18432, 61, 64, 64, 163840),
        **{
            "model_type": "kimi_k2",
            "aux_loss_alpha": 0.001,
            "bos_token_id": 163584,
            "eos_token_id": 163585,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "n_group": 1,
            "n_routed_experts": 384,
            "num_nextn_predict_layers": 0,
            "rope_scaling": _DEEPSEEK_YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "topk_group": 1,
            **more,
        },
    )


def _glm(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        **USUAL,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
        "pad_token_id": 151329,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
        **decoder_sizes(*sizes),
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        **USUAL,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "output_router_logits": False,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
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
        **decoder_sizes(2880, 2880, layers, 64, 8, 201088),
    }


def _llama4(experts: int, step: int, **text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "text_config": {
            **USUAL,
            "model_type": "llama4_text",
            "attention_chunk_size": 8192,
            "bos_token_id": 200000,
            "eos_token_id": [200001, 200007, 200008],
            "for_llm_compression": False,
            "head_dim": 128,
            "interleave_moe_layer_step": step,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 262144,
            "no_rope_layers": [],
            "num_experts_per_tok": 1,
            "num_local_experts": experts,
            "output_router_logits": False,
            "pad_token_id": 200018,
            "rope_theta": 500000.0,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "use_qk_norm": True,
            **decoder_sizes(5120, 8192, 48, 40, 8, 202048),
            **text,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0.dev0",
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
    }


EXPERTS: dict[str, dict[str, Any]] = {
    "mistralai/Mixtral-8x7B-v0.1": _mixtral(4096, 14336, 32, 32, 8, 32000),
    "mistralai/Mixtral-8x22B-v0.1": _mixtral(
        6144, 16384, 56, 48, 8, 32000, max_position_embeddings=65536, router_aux_loss_coef=0.001
    ),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 6144, 48, 32, 4, 151936),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": _qwen3_moe(
        *(6144, 8192, 62, 96, 8, 151936),
        max_position_embeddings=262144,
        moe_intermediate_size=2560,
        num_experts=160,
        qkv_bias=False,
        rope_theta=10000000,
        router_aux_loss_coef=0.0,
        shared_expert_intermediate_size=0,
        use_qk_norm=True,
    ),
    "deepseek-ai/DeepSeek-V3": _deepseek(7168, 18432, 61, 128, 128, 129280),
    "moonshotai/Moonlight-16B-A3B": without(
        _deepseek(
            *(2048, 11264, 27, 16, 16, 163840),
            bos_token_id=163584,
            first_k_dense_replace=1,
            max_position_embeddings=8192,
            moe_intermediate_size=1408,
            n_group=1,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            num_nextn_predict_layers=0,
            q_lora_rank=None,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=50000.0,
            routed_scaling_factor=2.446,
            topk_group=1,
        ),
        "quantization_config",
    ),
    "moonshotai/Kimi-K2-Base": _kimi(),
    "moonshotai/Kimi-K2-Instruct-0905": _kimi(max_position_embeddings=262144),
    "zai-org/GLM-4.5": _glm(
        *(5120, 12288, 92, 96, 8, 151552),
        first_k_dense_replace=3,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "zai-org/GLM-4.5-Air": _glm(4096, 10944, 46, 96, 8, 151552),
    "zai-org/GLM-4.6": _glm(
        *(5120, 12288, 92, 96, 8, 151552),
        first_k_dense_replace=3,
        max_position_embeddings=202752,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "meta-llama/Llama-4-Scout-17B-16E": _llama4(
        *(16, 1),
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    ),
    "meta-llama/Llama-4-Maverick-17B-128E": _llama4(
        *(128, 2), moe_layers=list(range(1, 48, 2)), use_qk_norm=False
    ),
}
