"""Fields of a Megatron Bridge configuration other than those that are arguments of Megatron of the same name.

Names and meanings are those of megatron-bridge 0.6.2 (`ConfigContainer`, `GPTModelProvider`,
`MLAModelProvider`) and megatron-core 0.19.
"""

from __future__ import annotations

from typing import Final

#: Models that are Megatron's GPT, by class; `TransformerConfig` and extras of `GPTModel`.
MODELS: Final = (
    "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "megatron.bridge.models.mla_provider.MLAModelProvider",
)
#: Megatron's data sets for pretraining, by class.
DATASETS: Final = tuple(
    f"megatron.bridge.training.config.{name}" for name in ("GPTDatasetConfig", "MockGPTDatasetConfig")
)
#: Bridge's data sets for fine-tuning, which its own loop trains on, by class.
TUNING_DATASETS: Final = (
    "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig",
    "megatron.bridge.data.builders.gpt_sft.FinetuningDatasetConfig",
)
#: Adapters that a plan counts, by class, each with its rank where the file says none.
ADAPTERS: Final = {
    "megatron.bridge.peft.lora.LoRA": 32,
    "megatron.bridge.peft.canonical_lora.CanonicalLoRA": 32,
    "megatron.bridge.peft.dora.DoRA": 32,
}
#: Layer specifications that lead to the layers of pretrain_gpt.py.
LAYER_SPECS: Final = (
    "megatron.bridge.models.gpt_provider.default_layer_spec",
    "megatron.bridge.models.gpt_provider.transformer_engine_layer_spec",
    "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
)
#: Flags of a precision that a configuration names; other recipes of fp8 send weights in it.
PRECISIONS: Final = {
    "bf16_mixed": ("--bf16",),
    "fp16_mixed": ("--fp16",),
    "bf16_with_fp8_subchannel_scaling_mixed": (
        *("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "blockwise"),
    ),
}
#: Fields of a precision in fp8, each with its flag and Bridge's default.
FP8_FIELDS: Final = {
    "fp8": ("--fp8-format", None),
    "fp8_recipe": ("--fp8-recipe", "tensorwise"),
    "fp8_param_gather": ("--fp8-param-gather", False),
    "fp8_margin": ("--fp8-margin", 0),
    "fp8_amax_history_len": ("--fp8-amax-history-len", 1),
    "fp8_amax_compute_algo": ("--fp8-amax-compute-algo", "most_recent"),
    "first_last_layers_bf16": ("--first-last-layers-bf16", False),
    "num_layers_at_start_in_bf16": ("--num-layers-at-start-in-bf16", 0),
    "num_layers_at_end_in_bf16": ("--num-layers-at-end-in-bf16", 0),
}
#: Fields of a precision in fp8 with which more than the products of matrices is.
FP8_ATTENTION: Final = ("fp8_dot_product_attention", "fp8_multi_head_attention")
#: Sections whose fields are read.
READ: Final = (
    *("model", "train", "validation", "optimizer", "scheduler", "ddp", "dataset", "tokenizer", "rng"),
)
#: Sections that are not read: checkpoints, logs, starts of processes, overlap of communication.
LEFT_SECTIONS: Final = frozenset(
    (
        *("checkpoint", "logger", "profiling", "rerun_state_machine", "straggler", "nvrx_straggler", "ft"),
        *("dist", "env_vars", "inprocess_restart", "tensor_inspect", "comm_overlap"),
        "optimizer_config_override_provider",
    )
)
#: Fields that `models/bridge.py` reads together with others, or that other fields of the file imply.
ELSEWHERE: Final = frozenset(
    (
        *((section, name) for section in READ for name in ("bf16", "fp16", "params_dtype")),
        ("model", "activation_func"),
        ("model", "gated_linear_unit"),
        ("model", "num_query_groups"),
        ("model", "share_embeddings_and_output_weights"),
        ("model", "vocab_size"),
        ("model", "should_pad_vocab"),
        ("model", "make_vocab_size_divisible_by"),
        ("model", "transformer_layer_spec"),
        ("model", "seq_length"),
        ("model", "max_position_embeddings"),
        ("model", "attention_dropout"),
        ("model", "hidden_dropout"),
        ("dataset", "sequence_length"),
        ("dataset", "seq_length"),
        ("dataset", "blend"),
        ("tokenizer", "make_vocab_size_divisible_by"),
        ("tokenizer", "pad_vocab_size"),
        # Without its style, Megatron takes a constant decay and refuses two ends.
        ("scheduler", "start_weight_decay"),
        ("scheduler", "end_weight_decay"),
    )
)
#: Fields of the model that are reported as not read, by reason; none changes what the model computes. A field
#: whose argument has no influence on plans (class "free" of `options.registry`) becomes its flag and is not
#: here.
_LEFT: Final = {
    "the plan chooses it": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split attention_backend
        cp_comm_type distribute_saved_activations fine_grained_activation_offloading moe_deepep_num_sms
        moe_flex_dispatcher_backend moe_hybridep_num_sms moe_shared_expert_overlap moe_token_dispatcher_type
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        num_microbatches_with_partial_activation_checkpoints pipeline_model_parallel_layout
        virtual_pipeline_model_parallel_size
    """,
    "CUDA graphs, which a plan's layers do not use": """
        cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_scope
        cuda_graph_use_single_mempool cuda_graph_warmup_steps moe_pad_experts_for_cuda_graph_inference
    """,
    "Megatron's script sets it": """
        autocast_dtype batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs enable_autocast
        pipeline_dtype variable_seq_lengths
    """,
    "another kernel for the same layer": """
        memory_efficient_layer_norm persist_layer_norm use_transformer_engine_full_layer_spec
    """,
    "without effect on training in 16 or 32 bits": """
        hf_model_id hf_model_revision inference_sampling_seed mtp_enabled tp_only_amax_red
    """,
}
LEFT_FIELDS: Final = frozenset(" ".join(_LEFT.values()).split())
#: Arguments of Megatron's GPTModel that its script gives always; no other value is read.
SCRIPT_VALUES: Final = {"parallel_output": True, "scatter_embedding_sequence_parallel": True}
#: Fields of the model whose functions and objects Megatron's script makes for itself, with the beginnings of
#: their names: hooks of the training loop, and initial weights by --init-method-std.
OBJECTS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "no_sync_func", "param_sync_func"),
        ("megatron.", "functools.partial"),
    ),
    **dict.fromkeys(
        ("init_method", "output_layer_init_method", "embedding_init_method"),
        ("megatron.core.", "torch.nn.init."),
    ),
    "timers": ("megatron.",),
    "generation_config": ("transformers.",),
}
#: Flags of activations by function and gate; ``None``: Megatron's default, which has no flag.
ACTIVATIONS: Final[dict[tuple[str, bool], str | None]] = {
    ("silu", True): "--swiglu",
    ("gelu", False): None,
    ("quick_gelu", True): "--quick-geglu",
    ("squared_relu", False): "--squared-relu",
}
#: Fields outside `LEFT_FIELDS` that Megatron's script or a plan chooses. The script refuses the fused cross
#: entropy of Transformer Engine, which Bridge's loop takes; its own computes the same loss.
DECIDED: Final = frozenset(
    (
        ("model", "cross_entropy_fusion_impl"),
        ("ddp", "average_in_collective"),
        ("ddp", "grad_reduce_in_fp32"),
        ("ddp", "data_parallel_sharding_strategy"),
        ("tokenizer", "vocab_size"),
        ("dataset", "create_attention_mask"),
    )
)
