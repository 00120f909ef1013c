"""Values of config.json files of published models with layers that have a state, by model.

Each is on the model's page, https://huggingface.co/ and its key.
"""

from __future__ import annotations

from typing import Any

_USUAL = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def _nemotron(
    hidden: int, ffn: int, pattern: str, heads: int, state: int, mamba_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        **_USUAL,
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "attention_head_dim": 128,
        "bos_token_id": 1,
        "chunk_size": 256,
        "conv_kernel": 4,
        "eos_token_id": 2,
        "expand": 2,
        "hidden_dropout": 0.0,
        "hidden_size": hidden,
        "hybrid_override_pattern": pattern,
        "intermediate_size": ffn,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": mamba_heads,
        "mamba_proj_bias": False,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_groups": 8,
        "num_attention_heads": heads,
        "num_hidden_layers": len(pattern),
        "num_key_value_heads": 8,
        "num_logits_to_keep": 1,
        "pad_token_id": 0,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "ssm_state_size": state,
        "use_bias": False,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        "vocab_size": 131072,
        **more,
    }


HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        **_USUAL,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "transformers_version": "4.57.0.dev0",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "nvidia/Nemotron-H-8B-Base-8K": _nemotron(
        4096, 21504, "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-", 32, 128, 128
    ),
    "nvidia/Nemotron-H-56B-Base-8K": _nemotron(
        *(8192, 32768, "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-", 64, 256, 256),
        time_step_rank=512,
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _nemotron(
        *(2688, 1856, 5 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME", 32, 128, 64),
        mamba_ssm_cache_dtype="float32",
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_group=1,
        n_routed_experts=128,
        n_shared_experts=1,
        norm_eps=1e-05,
        norm_topk_prob=True,
        num_experts_per_tok=6,
        num_key_value_heads=2,
        partial_rotary_factor=1.0,
        rope_theta=10000,
        routed_scaling_factor=2.5,
        topk_group=1,
    ),
}
