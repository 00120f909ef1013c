"""The supported model types of Hugging Face's config.json: their fields, with transformers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hexi.models.hugging_face.fields import (
    DECODER,
    NEEDED,
    NO_BIAS,
    NO_BIASES,
    SILU,
    ModelType,
    Only,
)
from megatron_hexi.models.hugging_face.hybrids import HYBRIDS

_WINDOWS: Mapping[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_NO_NOISE = Only((0,), "noise in what routers see", "set it to 0")

#: Fields of models whose routers have sigmoid scores and a load-balancing bias (DeepSeek-V3, GLM-4.5).
_SCORED_EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": NEEDED,
    "n_routed_experts": NEEDED,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    # transformers computes no load-balancing loss for these types, so it has no such fields.
    "aux_loss_alpha": None,
    "seq_aux": True,
}
_SCORED_ONLY = {
    "hidden_act": SILU,
    "scoring_func": Only(("sigmoid",), "another score of experts", "give a model with sigmoid"),
    "topk_method": Only(("noaux_tc",), "another choice of experts", "give a model with noaux_tc"),
    "moe_layer_freq": Only((1,), "layers without experts among those that follow", "give a model with 1"),
}
_SCORED_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
_LATENT: Mapping[str, Any] = {
    **DECODER,
    **_SCORED_EXPERTS,
    "num_key_value_heads": 128,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "qk_head_dim": None,
    "max_position_embeddings": 4096,
}
_LATENT_TYPE: Mapping[str, Any] = {
    "architecture": "DeepseekV3ForCausalLM",
    "used": _LATENT,
    "only": {
        **_SCORED_ONLY,
        "attention_bias": NO_BIAS,
        "rope_interleave": Only((True,), "rotating halves instead of neighbours", "give a model with true"),
    },
    "aliases": _SCORED_ALIASES,
    # auto_map names code that computes the same as transformers' class; ep_size is a number of ranks.
    "harmless": frozenset({"auto_map", "ep_size"}),
    "stored_as": "fp8",
}

#: The supported types, by name.
TYPES: Mapping[str, ModelType] = {
    "llama": ModelType(
        "LlamaForCausalLM",
        {**DECODER, "attention_bias": False, "mlp_bias": False},
        {"hidden_act": SILU, "sliding_window": Only((), "attention in a window", "give a mistral")},
    ),
    "mistral": ModelType(
        "MistralForCausalLM",
        {**DECODER, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        {"hidden_act": SILU, **NO_BIASES},
    ),
    "mixtral": ModelType(
        "MixtralForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        {"hidden_act": SILU, **NO_BIASES, "router_jitter_noise": _NO_NOISE},
        {"num_experts": "num_local_experts"},
    ),
    "qwen2": ModelType(
        "Qwen2ForCausalLM",
        {**DECODER, **_WINDOWS, "num_key_value_heads": 32, "max_position_embeddings": 32768},
        {
            "hidden_act": SILU,
            # transformers does not read it: queries, keys and values have biases, other layers none.
            "attention_bias": Only(
                (True,), "Qwen2 without biases of queries, keys and values", "give a llama"
            ),
            "mlp_bias": NO_BIAS,
        },
    ),
    "qwen3": ModelType(
        "Qwen3ForCausalLM",
        {**DECODER, **_WINDOWS, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        {"hidden_act": SILU, **NO_BIASES},
    ),
    "qwen3_moe": ModelType(
        "Qwen3MoeForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "router_aux_loss_coef": 0.001,
        },
        {
            "hidden_act": SILU,
            **NO_BIASES,
            "qkv_bias": NO_BIAS,
            "use_qk_norm": Only((True,), "Qwen3 without norms of queries and keys", "give a mixtral"),
            "shared_expert_intermediate_size": Only((0,), "shared experts", "give a model without"),
        },
        {"num_experts": "num_local_experts"},
        # transformers gives every layer the window.
        frozenset({"max_window_layers"}),
    ),
    **HYBRIDS,
    "deepseek_v3": ModelType(**_LATENT_TYPE),
    "kimi_k2": ModelType(**_LATENT_TYPE),
    "glm4_moe": ModelType(
        "Glm4MoeForCausalLM",
        {
            **DECODER,
            **_SCORED_EXPERTS,
            "num_key_value_heads": 8,
            "attention_bias": False,
            "use_qk_norm": False,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
        },
        {**_SCORED_ONLY, "mlp_bias": NO_BIAS},
        _SCORED_ALIASES,
    ),
    "gpt_oss": ModelType(
        "GptOssForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        {
            "hidden_act": SILU,
            "attention_bias": Only((True,), "experts with biases beside attention without", "set it to true"),
        },
        {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        frozenset({"initial_context_length"}),
        "mxfp4",
    ),
    "gemma3_text": ModelType(
        "Gemma3ForCausalLM",
        {
            **DECODER,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "layer_types": None,
            "query_pre_attn_scalar": 256,
        },
        {
            "hidden_activation": Only(
                ("gelu_pytorch_tanh",), "another activation in a gated MLP", "give a model with its GELU"
            ),
            "attention_bias": NO_BIAS,
            "use_bidirectional_attention": Only((False,), "attention to later tokens", "set it to false"),
            "final_logit_softcapping": Only((), "capped logits", "give a model without"),
            "attn_logit_softcapping": Only((), "capped scores of attention", "give a model without"),
        },
        {"_sliding_window_pattern": "sliding_window_pattern"},
    ),
    "llama4_text": ModelType(
        "Llama4ForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size_mlp": NEEDED,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "router_aux_loss_coef": 0.001,
        },
        {
            "hidden_act": SILU,
            **NO_BIASES,
            "router_jitter_noise": _NO_NOISE,
            "for_llm_compression": Only((False,), "a model to compress", "set it to false"),
        },
    ),
    "phi3": ModelType(
        "Phi3ForCausalLM",
        {
            **DECODER,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        {
            "hidden_act": SILU,
            **NO_BIASES,
            "lm_head_bias": Only((False,), "a bias of the output layer", "give a model without"),
            # Fields of Microsoft's code.
            "full_attn_mod": Only((1,), "full attention in some layers only", "give a model with 1"),
            "interpolate_factor": Only((1,), "interpolated positions", "give a model with 1"),
        },
        # auto_map names code that computes the same as transformers' class.
        harmless=frozenset({"auto_map"}),
    ),
    "gpt2": ModelType(
        "GPT2LMHeadModel",
        {
            "architectures": None,
            "n_layer": NEEDED,
            "n_embd": NEEDED,
            "n_head": NEEDED,
            "n_inner": None,
            "n_positions": 1024,
            "vocab_size": NEEDED,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
        },
        {
            "n_special": Only((0,), "embeddings beside the vocabulary's", "add them to vocab_size"),
            "scale_attn_weights": Only((True,), "attention without a scale", "give a model with true"),
            "scale_attn_by_inverse_layer_idx": Only(
                (False,), "a scale of attention by layer", "give a model with false"
            ),
        },
        {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
}
