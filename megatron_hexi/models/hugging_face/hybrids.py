"""The model types of config.json whose layers may have a state in place of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_hexi.models.hugging_face.fields import (
    DECODER,
    NEEDED,
    NO_BIAS,
    NO_BIASES,
    ROTARY,
    SILU,
    ModelType,
    Only,
)

#: Fields of both types of LFM2, whose layers have a short convolution or attention before an MLP.
_LFM2 = {
    **{name: value for name, value in DECODER.items() if name != "rms_norm_eps"},
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "conv_L_cache": 3,
    "layer_types": None,
}
_LFM2_ONLY = {"conv_bias": Only((False,), "biases of short convolutions", "give a model without")}
#: How Liquid AI's own code draws fresh weights, and what transformers does not read of it.
_LFM2_HARMLESS = frozenset(
    {"block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"}
    | {"block_use_swiglu", "use_pos_enc"}
)

HYBRIDS: Mapping[str, ModelType] = {
    "qwen3_next": ModelType(
        "Qwen3NextForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "partial_rotary_factor": 0.25,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "router_aux_loss_coef": 0.001,
            "layer_types": None,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        {"hidden_act": SILU, **NO_BIASES},
    ),
    "lfm2": ModelType(
        "Lfm2ForCausalLM",
        {
            **_LFM2,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "full_attn_idxs": None,
        },
        _LFM2_ONLY,
        {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
        _LFM2_HARMLESS,
    ),
    "lfm2_moe": ModelType(
        "Lfm2MoeForCausalLM",
        {
            **_LFM2,
            "layer_types": NEEDED,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        _LFM2_ONLY,
        {"tie_embedding": "tie_word_embeddings"},
        _LFM2_HARMLESS,
    ),
    "nemotron_h": ModelType(
        "NemotronHForCausalLM",
        {
            **{name: value for name, value in DECODER.items() if name not in (*ROTARY, "rms_norm_eps")},
            "num_hidden_layers": None,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
            "layers_block_type": None,
            "hybrid_override_pattern": None,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "aux_loss_alpha": None,
            "seq_aux": True,
        },
        {
            **NO_BIASES,
            "mlp_hidden_act": Only(("relu2",), "another activation in an MLP without gate", "write relu2"),
            "mamba_hidden_act": Only(("silu", "swish"), "another activation in Mamba", "write silu"),
            "use_conv_bias": Only((True,), "a convolution without bias", "set it to true"),
            "use_bias": NO_BIAS,
            "mamba_proj_bias": NO_BIAS,
            "moe_latent_size": Only((), "latent experts", "give a model without"),
            "num_nextn_predict_layers": Only((0,), "multi-token prediction of a hybrid", "set it to 0"),
            "residual_in_fp32": Only((False,), "a residual stream in fp32", "set it to false"),
            "sliding_window": Only((), "attention in a window in a hybrid", "set it to null"),
            # Megatron's step has no other limits, and fresh ones are drawn from this range.
            "time_step_limit": Only(
                ([0.0, math.inf], (0.0, math.inf), [0.0, 1e308]), "a limit of Mamba's step", "remove it"
            ),
        },
        {
            "layer_types": "layers_block_type",
            "num_local_experts": "n_routed_experts",
            "attention_head_dim": "head_dim",
            "rms_norm_eps": "layer_norm_epsilon",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_dt_limit": "time_step_limit",
        },
        # Rotary embeddings it has none; kernels choose chunks, and Megatron draws fresh steps and weights.
        frozenset(
            {"auto_map", "max_position_embeddings", "rope_theta", "chunk_size", "expand", "n_shared_experts"}
            | {"use_mamba_kernels", "num_logits_to_keep", "mamba_ssm_cache_dtype", "time_step_rank"}
            | {"time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"}
            | {"mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor", "mamba_expand", "mamba_chunk_size"}
            | {"moe_shared_expert_overlap", "mtp_layers_block_type", "mtp_hybrid_override_pattern"}
        ),
    ),
}
