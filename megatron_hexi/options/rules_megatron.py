"""Rules for what Megatron's own checks refuse: arguments that contradict each other, under any plan.

The checks are `validate_args` (megatron/training/arguments.py) and `TransformerConfig.__post_init__` of
megatron-core 0.17 to 0.19. Each rank would end in their traceback. A test feeds the words of each rule, and
random pairs of options, to both parsers.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_hexi.kinds.states import hybrid_layers
from megatron_hexi.options.kinds import Refused, Supported, given


def _stops(option: str, against: str, used: Callable[[Namespace], Any], remedy: str) -> Refused:
    """Return a rule that Megatron refuses an option beside something, `against`."""
    return Refused(
        option,
        lambda args: bool(used(args)),
        "Megatron refuses it",
        remedy,
        f"with {against}",
        against=against,
    )


#: Options that Megatron takes beside another one only, which no plan trains with.
_NEEDING = {
    "--fp8-param-gather": "--fp8-format",
    "--fp4-param-gather": "--fp4-format",
    "--moe-router-padding-for-fp8": "--fp8-format",
    "--moe-router-padding-for-quantization": "--fp8-format",
    "--fsdp-manual-registration": "--use-megatron-fsdp",
    "--ep-overlap-early-attn-memory-release": "--overlap-moe-expert-parallel-comm",
    "--inference-disable-triton-nvls-kernels": "--transformer-impl inference_optimized",
}


def _get(args: Namespace, name: str) -> Any:
    """Return an argument; ``None`` where it is not given, or an older version lacks it."""
    return getattr(args, name, None)


def _positions(args: Namespace) -> str:
    rotary = args.use_rotary_position_embeddings
    return "rope" if rotary else getattr(args.position_embedding_type, "name", args.position_embedding_type)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _recomputes(args: Namespace, module: str) -> bool:
    return args.recompute_granularity == "selective" and module in (args.recompute_modules or ())


def _is_delta_net(args: Namespace) -> bool:
    return _get(args, "experimental_attention_variant") == "gated_delta_net"


def _gated(args: Namespace) -> bool:
    return bool(args.swiglu or args.quick_geglu)


def _is_constant(args: Namespace) -> bool:
    return args.weight_decay_incr_style == "constant"


OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    "What Megatron refuses": (
        _stops(
            "--mtp-num-layers",
            "positions other than rope and none",
            lambda args: args.mtp_num_layers and _positions(args) not in ("rope", "none"),
            "give --position-embedding-type rope or none",
        ),
        _stops(
            "--rotary-interleaved",
            "--multi-latent-attention",
            lambda args: args.rotary_interleaved and args.multi_latent_attention,
            "leave --rotary-interleaved out",
        ),
        _stops(
            "--max-position-embeddings",
            "learned positions and a longer sequence",
            lambda args: (
                _positions(args) == "learned_absolute"
                and (positions := args.max_position_embeddings) is not None
                and positions < (args.seq_length or args.encoder_seq_length or 0)
            ),
            "give --max-position-embeddings of at least --seq-length",
        ),
        _stops(
            "--group-query-attention",
            "--multi-latent-attention",
            lambda args: args.group_query_attention and args.multi_latent_attention,
            "leave --group-query-attention out",
        ),
        _stops(
            "--experimental-attention-variant",
            "--linear-attention-freq left out",
            lambda args: (
                _is_delta_net(args)
                and not hybrid_layers(args)
                and _get(args, "linear_attention_freq") is None
            ),
            "give --linear-attention-freq N",
        ),
        _stops(
            "--glu-linear-offset",
            "another activation than --quick-geglu",
            lambda args: args.glu_linear_offset and not args.quick_geglu and args.bias_swiglu_fusion,
            "give --quick-geglu in place of --swiglu, or --no-bias-swiglu-fusion",
        ),
        _stops(
            "--use-te-activation-func",
            "fused biases",
            lambda args: (
                _get(args, "use_te_activation_func")
                and (args.bias_swiglu_fusion if _gated(args) else args.bias_gelu_fusion)
            ),
            "give --no-bias-swiglu-fusion and --no-bias-gelu-fusion",
        ),
        _stops(
            "--fused-residual-rmsnorm",
            "another norm than RMSNorm",
            lambda args: _get(args, "fused_residual_rmsnorm") and args.normalization != "RMSNorm",
            "give --normalization RMSNorm",
        ),
        _stops(
            "--moe-router-topk",
            "a softmax over one expert",
            lambda args: (
                args.moe_router_topk == 1
                and args.moe_router_score_function == "softmax"
                and not args.moe_router_pre_softmax
            ),
            "give --moe-router-pre-softmax",
        ),
        _stops(
            "--moe-router-enable-expert-bias",
            "scores by softmax",
            lambda args: (
                args.moe_router_enable_expert_bias
                and args.moe_router_score_function not in ("sigmoid", "sqrtsoftplus")
            ),
            "give --moe-router-score-function sigmoid",
        ),
        _stops(
            "--moe-aux-loss-coeff",
            "another number of balancing losses",
            lambda args: (
                len(losses := _items(args.moe_router_load_balancing_type)) > 1
                and len(losses) != len(_items(args.moe_aux_loss_coeff))
            ),
            "give one coefficient for each of --moe-router-load-balancing-type",
        ),
        _stops(
            "--moe-router-group-topk",
            "groups that do not divide the experts, or are fewer",
            lambda args: (
                (chosen := args.moe_router_group_topk)
                and (
                    not (groups := args.moe_router_num_groups)
                    or (args.num_experts or 0) % groups
                    or chosen > groups
                )
            ),
            "give --moe-router-num-groups with a divisor of --num-experts, as many or more",
        ),
        _stops(
            "--moe-ffn-hidden-size",
            "--num-experts left out",
            lambda args: (
                args.moe_ffn_hidden_size is not None
                and not args.num_experts
                and (args.moe_layer_freq in (None, 1) or 0 not in _items(args.moe_layer_freq))
            ),
            "give --num-experts, or leave it out",
        ),
        _stops(
            "--moe-shared-expert-intermediate-size",
            "a size of 0 or less",
            lambda args: (size := args.moe_shared_expert_intermediate_size) is not None and size <= 0,
            "leave it out, or give a size",
        ),
        _stops(
            "--recompute-method",
            "--recompute-granularity selective",
            lambda args: (
                args.recompute_granularity == "selective"
                and (args.recompute_method is not None or args.recompute_num_layers is not None)
            ),
            "leave out --recompute-method and --recompute-num-layers, or give --recompute-granularity full",
        ),
        *(
            _stops(
                "--recompute-modules",
                f"{module} and {lacking} left out",
                lambda args, module=module, name=name: (  # type: ignore[misc]
                    _recomputes(args, module) and not _get(args, name)
                ),
                f"leave {module} out of the list, or give {lacking}",
            )
            for module, lacking, name in (
                ("moe_act", "--moe-grouped-gemm", "moe_grouped_gemm"),
                ("mla_up_proj", "--multi-latent-attention", "multi_latent_attention"),
            )
        ),
        _stops(
            "--cross-entropy-fusion-impl",
            "te and --cross-entropy-loss-fusion",
            lambda args: args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te",
            "give native",
        ),
        _stops(
            "--min-lr",
            "a smaller --lr",
            lambda args: args.lr is not None and (args.min_lr or 0) > args.lr,
            "give a --min-lr of at most --lr",
        ),
        _stops(
            "--lr-warmup-fraction",
            "--lr-warmup-iters or --lr-warmup-samples",
            lambda args: (
                args.lr_warmup_fraction is not None
                and (
                    (args.train_iters and args.lr_warmup_iters)
                    or (args.train_samples and args.lr_warmup_samples)
                )
            ),
            "leave one of them out",
        ),
        _stops(
            "--weight-decay-incr-style",
            "a start or an end that it does not have, or without them",
            lambda args: (
                (args.start_weight_decay is not None or args.end_weight_decay is not None)
                if _is_constant(args)
                else None in (args.start_weight_decay, args.end_weight_decay)
            ),
            "give --start-weight-decay and --end-weight-decay with linear or cosine, and only then",
        ),
        _stops(
            "--save-retain-interval",
            "a --save-interval that does not divide it",
            lambda args: (
                args.save
                and args.save_interval
                and (kept := _get(args, "save_retain_interval")) is not None
                and (kept <= 0 or kept % args.save_interval)
            ),
            "give a multiple of --save-interval",
        ),
        _stops(
            "--log-memory-interval",
            "a --log-interval that does not divide it",
            lambda args: (every := _get(args, "log_memory_interval")) and every % max(args.log_interval, 1),
            "give a multiple of --log-interval",
        ),
        _stops(
            "--load-main-params-from-ckpt",
            "the optimizer's state loaded too",
            lambda args: _get(args, "load_main_params_from_ckpt") and not args.no_load_optim,
            "give --no-load-optim",
        ),
        _stops(
            "--override-ckpt-iteration",
            "--finetune",
            lambda args: _get(args, "override_ckpt_iteration") is not None and args.finetune,
            "leave one of them out",
        ),
        _stops(
            "--moe-use-upcycling",
            "--save left out",
            lambda args: _get(args, "moe_use_upcycling") and not args.save,
            "give --save FOLDER",
        ),
        _stops(
            "--ckpt-format",
            "torch_dcp or fsdp_dtensor",
            lambda args: args.ckpt_format in ("torch_dcp", "fsdp_dtensor"),
            "give torch_dist: those are of sharded data parallelism",
        ),
        _stops(
            "--optimizer-cpu-offload",
            "--use-precision-aware-optimizer left out",
            lambda args: args.optimizer_cpu_offload and not args.use_precision_aware_optimizer,
            "give --use-precision-aware-optimizer too",
        ),
        *(
            given(option, f"Megatron takes it beside {needed} only, which no plan trains with")
            for option, needed in _NEEDING.items()
        ),
        given(
            "--init-method-xavier-uniform",
            "Megatron's configuration lacks the field that it sets",
            "give --init-method-std in its place",
            since="0.19",
        ),
        _stops(
            "--num-dataset-builder-threads",
            "a number below 1",
            lambda args: args.num_dataset_builder_threads < 1,
            "give 1 or more",
        ),
        _stops(
            "--ckpt-convert-format",
            "--ckpt-convert-save and --load left out",
            lambda args: args.ckpt_convert_format is not None and None in (args.ckpt_convert_save, args.load),
            "give both, or leave it out",
        ),
        _stops(
            "--non-persistent-ckpt-type",
            "in_memory, or local and --non-persistent-local-ckpt-dir left out",
            lambda args: (
                args.non_persistent_ckpt_type == "in_memory"
                or (args.non_persistent_ckpt_type == "local" and args.non_persistent_local_ckpt_dir is None)
            ),
            "give global, or local and a folder",
        ),
        _stops(
            "--moe-latent-size",
            "a size of 0 or less, or --num-experts left out",
            lambda args: (
                (size := _get(args, "moe_latent_size")) is not None and (size <= 0 or not args.num_experts)
            ),
            "give a size and --num-experts, or leave it out",
        ),
        _stops(
            "--moe-flex-dispatcher-backend",
            "ncclep",
            lambda args: _get(args, "moe_flex_dispatcher_backend") == "ncclep",
            "leave it out: it is of --moe-token-dispatcher-type flex",
        ),
        _stops(
            "--inference-batch-times-seqlen-threshold",
            "one pipeline stage",
            lambda args: (
                args.inference_batch_times_seqlen_threshold > -1 and args.pipeline_model_parallel_size == 1
            ),
            "leave it out",
        ),
        _stops(
            "--mla-down-proj-fusion",
            "--multi-latent-attention left out",
            lambda args: _get(args, "mla_down_proj_fusion") and not args.multi_latent_attention,
            "leave it out",
        ),
        _stops(
            "--mock-data",
            "other data",
            lambda args: (
                bool(args.mock_data)
                + bool(args.data_path)
                + any((args.train_data_path, args.valid_data_path, args.test_data_path))
                > 1
            ),
            "give one of --mock-data, --data-path, and --train-data-path with its like",
        ),
    ),
}
