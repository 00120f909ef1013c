"""The types of Hugging Face's config.json that are read: what each field of theirs means here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hexi.cost.hugging_face_fields import NEEDED, ModelType, Only

_ROTARY: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
}
_DECODER: Mapping[str, Any] = {
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
    "sliding_window": None,
    **_ROTARY,
}
_WINDOWS: Mapping[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_SILU = Only(("silu", "swish"), "another activation in a gated MLP", "give a model with silu")
_NO_BIAS = Only(
    (False,),
    "biases in some linear layers only, of which Megatron has those of queries, keys and values,",
    "give a model without",
)
_NO_BIASES = {"attention_bias": _NO_BIAS, "mlp_bias": _NO_BIAS}

_DENSE_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType(
        "LlamaForCausalLM", {**_DECODER, "attention_bias": False, "mlp_bias": False}, {"hidden_act": _SILU}
    ),
    "mistral": ModelType(
        "MistralForCausalLM",
        {**_DECODER, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        {"hidden_act": _SILU, **_NO_BIASES},
    ),
    "qwen2": ModelType(
        "Qwen2ForCausalLM",
        {**_DECODER, **_WINDOWS, "num_key_value_heads": 32, "max_position_embeddings": 32768},
        {
            "hidden_act": _SILU,
            # transformers does not read it: queries, keys and values have biases, other layers none.
            "attention_bias": Only(
                (True,), "Qwen2 without biases of queries, keys and values", "give a llama"
            ),
            "mlp_bias": _NO_BIAS,
        },
    ),
    "qwen3": ModelType(
        "Qwen3ForCausalLM",
        {
            **_DECODER,
            **_WINDOWS,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        {"hidden_act": _SILU, **_NO_BIASES},
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

_ROUTER: Mapping[str, Any] = {"num_experts_per_tok": NEEDED, "router_aux_loss_coef": 0.001}
_NO_JITTER = Only((0, 0.0), "noise before the router", "set it to 0")
_ALL_EXPERTS = {"num_experts": "num_local_experts"}

#: DeepSeek-V3's, which Kimi K2 has with other sizes. Its sigmoid scores with a bias are in no other type.
_DEEPSEEK = ModelType(
    "DeepseekV3ForCausalLM",
    {
        **_DECODER,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "q_lora_rank": NEEDED,
        "kv_lora_rank": NEEDED,
        "qk_nope_head_dim": NEEDED,
        "qk_rope_head_dim": NEEDED,
        "v_head_dim": NEEDED,
        "qk_head_dim": None,
        "n_routed_experts": NEEDED,
        "n_shared_experts": 1,
        "moe_intermediate_size": NEEDED,
        "num_experts_per_tok": NEEDED,
        "first_k_dense_replace": NEEDED,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "aux_loss_alpha": None,
        "seq_aux": True,
        "num_nextn_predict_layers": 1,
    },
    {
        "hidden_act": _SILU,
        "attention_bias": _NO_BIAS,
        "rope_interleave": Only((True,), "rotating halves instead of neighbours", "give a model with true"),
        "moe_layer_freq": Only((1,), "dense layers between those with experts", "give a model with 1"),
        "scoring_func": Only(("sigmoid",), "another score of experts", "give a model with sigmoid"),
        "topk_method": Only(("noaux_tc",), "another choice of experts", "give a model with noaux_tc"),
    },
    {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    {
        "auto_map": "its own code computes what transformers' class does",
        "quantization_config": "its weights were published in fp8, and are trained in another precision",
        "ep_size": "how experts are dealt to ranks, which a job chooses",
    },
)

#: Types with experts, or with windows in some layers.
_OTHER_TYPES: Mapping[str, ModelType] = {
    "mixtral": ModelType(
        "MixtralForCausalLM",
        {
            **_DECODER,
            **_ROUTER,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": NEEDED,
        },
        {"hidden_act": _SILU, **_NO_BIASES, "router_jitter_noise": _NO_JITTER},
        _ALL_EXPERTS,
    ),
    "qwen3_moe": ModelType(
        "Qwen3MoeForCausalLM",
        {
            **_DECODER,
            **_ROUTER,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_local_experts": NEEDED,
            "moe_intermediate_size": NEEDED,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": False,
        },
        {"hidden_act": _SILU, **_NO_BIASES},
        _ALL_EXPERTS,
        {"max_window_layers": "transformers' class does not read it: a window is all layers'"},
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": ModelType(
        "Glm4MoeForCausalLM",
        {
            **_DECODER,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "use_qk_norm": False,
            "n_routed_experts": NEEDED,
            "n_shared_experts": 1,
            "moe_intermediate_size": NEEDED,
            "num_experts_per_tok": NEEDED,
            "first_k_dense_replace": NEEDED,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 1,
        },
        {"hidden_act": _SILU, "mlp_bias": _NO_BIAS},
        {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
    "gpt_oss": ModelType(
        "GptOssForCausalLM",
        {
            **_DECODER,
            **_ROUTER,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "num_local_experts": NEEDED,
            "experts_per_token": None,
            "sliding_window": 128,
            "layer_types": None,
            "swiglu_limit": 7.0,
        },
        {
            "hidden_act": _SILU,
            "attention_bias": Only((True,), "attention without biases", "give a model with true"),
            "swiglu_alpha": Only((1.702,), "another slope of the gate", "give a model with 1.702"),
        },
        _ALL_EXPERTS,
        {
            "quantization_config": "its weights were published in mxfp4, and are trained in another",
            "initial_context_length": "the rotary mapping says it too",
        },
    ),
    "gemma3_text": ModelType(
        "Gemma3ForCausalLM",
        {
            **_DECODER,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "layer_types": None,
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": 6,
        },
        {
            **dict.fromkeys(
                ("hidden_activation", "hidden_act"),
                Only(("gelu_pytorch_tanh",), "another activation", "give a model with gelu_pytorch_tanh"),
            ),
            "attention_bias": _NO_BIAS,
            "use_bidirectional_attention": Only((False,), "attention to later tokens", "set it to false"),
            **dict.fromkeys(
                ("attn_logit_softcapping", "final_logit_softcapping"),
                Only((), "a soft cap", "give a model with null"),
            ),
        },
    ),
    "llama4_text": ModelType(
        "Llama4ForCausalLM",
        {
            **_DECODER,
            **_ROUTER,
            "vocab_size": 202048,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "intermediate_size_mlp": NEEDED,
            "num_local_experts": NEEDED,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        {"hidden_act": _SILU, "attention_bias": _NO_BIAS, "router_jitter_noise": _NO_JITTER},
        {},
        {"for_llm_compression": "transformers' class does not read it"},
    ),
    "phi3": ModelType(
        "Phi3ForCausalLM",
        {
            **{name: value for name, value in _DECODER.items() if name != "head_dim"},
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
        },
        {"hidden_act": _SILU, **_NO_BIASES},
        {},
        {"auto_map": "its own code computes what transformers' class does"},
    ),
}

#: The types that are read.
TYPES: Mapping[str, ModelType] = {**_DENSE_TYPES, **_OTHER_TYPES}

#: Models with vision, whose language model is in text_config: its type, and the class of the whole.
WITH_VISION: Mapping[str, tuple[str, str]] = {
    "gemma3": ("gemma3_text", "Gemma3ForConditionalGeneration"),
    "llama4": ("llama4_text", "Llama4ForConditionalGeneration"),
}
#: Fields of such a file that belong to vision.
VISION_FIELDS = frozenset(
    (
        *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
        *("image_token_id", "boi_token_id", "eoi_token_id"),
    )
)
