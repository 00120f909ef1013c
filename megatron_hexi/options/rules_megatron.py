"""Rules for what Megatron's own checks refuse: arguments that contradict each other, under any plan.

The checks are `validate_args` (megatron/training/arguments.py), and those of the model's configuration
(`TransformerConfig.__post_init__` and what builds it), of megatron-core 0.17 to 0.19. Each rank would end in
their traceback. Tests feed the words of each rule, each option alone, and random pairs of options to both.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_hexi.options.kinds import Refused, Supported, describe, given, holds, items_of

#: Conditions (`conditions`) which Megatron refuses together, with the remedy. The first names the option.
STOPS = {
    # The model.
    **{f"--encoder-{name}, --{name}": f"give --{name} alone" for name in ("num-layers", "seq-length")},
    "--squared-relu, --swiglu": "leave one of them out",
    "--quick-geglu, --swiglu": "leave one of them out",
    "--mtp-num-layers, --position-embedding-type not rope|none, no --use-rotary-position-embeddings": (
        "give --position-embedding-type rope or none"
    ),
    "--mtp-hybrid-override-pattern, --mtp-num-layers": "leave --mtp-hybrid-override-pattern out",
    "--rotary-interleaved, --multi-latent-attention": "leave --rotary-interleaved out",
    "--rope-type yarn, no --multi-latent-attention": "give --position-embedding-type yarn in its place",
    "--no-rope-freq, --num-layers % --no-rope-freq": "give a divisor of --num-layers",
    "--flash-decode, --no-rope-freq": "leave --flash-decode out: it is for inference",
    "--mup-base-hidden-size < 1, --use-mup": "give the hidden size that was tuned",
    "--max-position-embeddings < --seq-length or --max-position-embeddings < --encoder-seq-length, "
    "--position-embedding-type learned_absolute, no --use-rotary-position-embeddings": (
        "give --max-position-embeddings of at least the sequence"
    ),
    "--group-query-attention, --multi-latent-attention": "leave --group-query-attention out",
    "--mla-down-proj-fusion, no --multi-latent-attention": "leave it out",
    "--attention-output-gate, --multi-latent-attention": "leave --attention-output-gate out",
    "--experimental-attention-variant gated_delta_net, no --linear-attention-freq": (
        "give --linear-attention-freq N"
    ),
    "--glu-linear-offset, no --quick-geglu, no --no-bias-swiglu-fusion": (
        "give --quick-geglu in place of --swiglu, or --no-bias-swiglu-fusion"
    ),
    "--squared-relu, no --swiglu, no --disable-bias-linear, no --no-bias-gelu-fusion": (
        "give --disable-bias-linear or --no-bias-gelu-fusion"
    ),
    "--use-te-activation-func, --swiglu, no --no-bias-swiglu-fusion": "give --no-bias-swiglu-fusion",
    "--use-te-activation-func, no --swiglu, no --disable-bias-linear, no --no-bias-gelu-fusion": (
        "give --no-bias-gelu-fusion"
    ),
    "--fused-residual-rmsnorm, --normalization not RMSNorm": "give --normalization RMSNorm",
    # Mixture of experts.
    "--moe-router-topk 1, --moe-router-score-function softmax, no --moe-router-pre-softmax, "
    "--moe-router-load-balancing-type not sinkhorn": "give --moe-router-pre-softmax",
    "--moe-router-enable-expert-bias, --moe-router-score-function not sigmoid|sqrtsoftplus": (
        "give --moe-router-score-function sigmoid"
    ),
    "--moe-router-group-topk > 0, no --moe-router-num-groups or no --num-experts": (
        "give --num-experts and --moe-router-num-groups, or leave it out"
    ),
    "--moe-router-group-topk > --moe-router-num-groups": "give at most --moe-router-num-groups",
    "--moe-router-num-groups, --num-experts % --moe-router-num-groups, --moe-router-group-topk": (
        "give a divisor of --num-experts"
    ),
    "--moe-shared-expert-intermediate-size < 1": "leave it out, or give a size",
    "--moe-latent-size < 1 or no --num-experts, --moe-latent-size": (
        "give a size and --num-experts, or leave it out"
    ),
    "--moe-single-grouped-weight, no --moe-grouped-gemm or no --use-transformer-engine-op-fuser": (
        "give --moe-grouped-gemm and --use-transformer-engine-op-fuser, or leave it out"
    ),
    "--moe-single-grouped-bias, no --moe-grouped-gemm or --disable-bias-linear": (
        "give --moe-grouped-gemm without --disable-bias-linear, or leave it out"
    ),
    "--moe-flex-dispatcher-backend ncclep": "leave it out: it is of --moe-token-dispatcher-type flex",
    "--moe-deepep-num-sms < --moe-hybridep-num-sms or --moe-deepep-num-sms > --moe-hybridep-num-sms, "
    "no --moe-flex-dispatcher-num-sms": "give --moe-flex-dispatcher-num-sms in their place",
    "--moe-use-upcycling, no --save": "give --save FOLDER",
    "--expert-model-parallel-size > 1, no --num-experts": "leave --expert-model-parallel-size out",
    "--expert-model-parallel-size, --num-experts % --expert-model-parallel-size": (
        "give a divisor of --num-experts"
    ),
    # Memory and kernels.
    **{
        f"{option}, --recompute-granularity selective or --recompute-activations": (
            "leave it out, or give --recompute-granularity full"
        )
        for option in ("--recompute-method", "--recompute-num-layers")
    },
    "--recompute-granularity full, no --recompute-method or no --recompute-num-layers": (
        "give --recompute-method uniform and --recompute-num-layers 1 too"
    ),
    **{
        f"--recompute-modules {module}, --recompute-granularity selective or --recompute-activations, "
        f"no {needed}": f"leave {module} out of the list, or give {needed}"
        for module, needed in (("moe_act", "--moe-grouped-gemm"), ("mla_up_proj", "--multi-latent-attention"))
    },
    **{
        f"--recompute-modules {module}, --recompute-granularity selective or --recompute-activations, "
        "--fp8-format, --fp8-recipe delayed": (
            f"leave {module} out of the list, or give --fp8-recipe tensorwise, blockwise or mxfp8"
        )
        for module in ("moe_act", "layernorm")
    },
    "--distribute-saved-activations, --recompute-granularity not full": "give --recompute-granularity full",
    "--distribute-saved-activations, --sequence-parallel": "leave one of them out",
    "--cross-entropy-fusion-impl te, --cross-entropy-loss-fusion": "give native",
    "--fp16, --bf16": "leave one of them out",
    "--first-last-layers-bf16, --fp8-format, --fp8-recipe delayed": (
        "give --fp8-recipe tensorwise, blockwise or mxfp8"
    ),
    "--fp16-lm-cross-entropy, no --fp16": "give --fp16, or leave it out",
    "--fp32-residual-connection, no --fp16, no --bf16": "give --bf16, or leave it out",
    "--main-grads-dtype not fp32, --accumulate-allreduce-grads-in-fp32, --bf16": "leave one of them out",
    "--optimizer-cpu-offload, no --use-precision-aware-optimizer": "give --use-precision-aware-optimizer too",
    # Ranks.
    "--inference-cuda-graph-scope layer|block": "leave it out",
    "--overlap-param-gather, no --use-distributed-optimizer, --optimizer not dist_muon": (
        "give --use-distributed-optimizer too"
    ),
    "--overlap-param-gather, no --overlap-grad-reduce": "give --overlap-grad-reduce too",
    "--overlap-p2p-communication-warmup-flush, no --num-virtual-stages-per-pipeline-rank, "
    "no --num-layers-per-virtual-pipeline-stage, no --pipeline-model-parallel-layout": "leave it out",
    "--inference-batch-times-seqlen-threshold > -1, --pipeline-model-parallel-size 1": "leave it out",
    # The schedule.
    **{
        f"{counted} > 0, {' or '.join(others)}, no --skip-train": (
            "state the whole schedule in iterations, or in samples"
        )
        for counted, others in (
            ("--train-iters", ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples")),
            ("--train-samples", ("--train-iters", "--lr-decay-iters", "--lr-warmup-iters")),
        )
    },
    "--lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples": "leave one of them out",
    "--min-lr > --lr": "give a --min-lr of at most --lr",
    "--weight-decay-incr-style constant, --start-weight-decay or --end-weight-decay": (
        "give linear or cosine, or leave these out"
    ),
    "--weight-decay-incr-style not constant, no --start-weight-decay or no --end-weight-decay": (
        "give --start-weight-decay and --end-weight-decay too"
    ),
    "--eval-global-batch-size % --eval-micro-batch-size": "give a multiple",
    "--eval-micro-batch-size, --global-batch-size % --eval-micro-batch-size, no --eval-global-batch-size": (
        "give a divisor of --global-batch-size"
    ),
    # Checkpoints, data and logs.
    "--save-interval < 1, --save": "give a number of iterations",
    "--save-retain-interval < 1 or --save-retain-interval % --save-interval, --save": (
        "give a multiple of --save-interval"
    ),
    "--save-params-interval, --save, --overlap-param-gather": "leave --save-params-interval out",
    "--load-main-params-from-ckpt, no --no-load-optim": "give --no-load-optim",
    "--override-ckpt-iteration, --finetune": "leave one of them out",
    "--ckpt-format torch_dcp|fsdp_dtensor": "give torch_dist: those are of sharded data parallelism",
    "--ckpt-convert-format, no --ckpt-convert-save or no --load": "give both, or leave it out",
    "--distrib-optim-fully-reshardable-mem-efficient, --disable-gloo-process-groups, "
    "--dist-ckpt-optim-fully-reshardable, --use-distributed-optimizer": "leave one of them out",
    "--non-persistent-ckpt-type in_memory": "give global, or local and a folder",
    "--non-persistent-ckpt-type local, no --non-persistent-local-ckpt-dir": (
        "give --non-persistent-local-ckpt-dir FOLDER"
    ),
    "--replication, no --replication-jump or --non-persistent-ckpt-type not local": (
        "give --non-persistent-ckpt-type local and --replication-jump N, or leave it out"
    ),
    "--log-memory-interval % --log-interval": "give a multiple of --log-interval",
    **{
        f"{data}, {' or '.join(others)}": "give data of one kind"
        for data, others in (
            ("--mock-data", ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")),
            ("--data-path", ("--train-data-path", "--valid-data-path", "--test-data-path")),
        )
    },
    **{
        f"{option} < 1": "give 1 or more"
        for option in (
            "--context-parallel-size",
            "--decoder-first-pipeline-num-layers",
            "--decoder-last-pipeline-num-layers",
            "--eval-micro-batch-size",
            "--expert-tensor-parallel-size",
            "--expert-tensor-parallel-num-weight-shards",
            "--global-batch-size",
            "--micro-batch-size",
            "--num-dataset-builder-threads",
            "--num-layers",
            "--num-layers-per-virtual-pipeline-stage",
            "--tensor-model-parallel-size",
            "--tensor-parallel-num-weight-shards",
        )
    },
}
#: Options that Megatron takes beside another one only, which no plan trains with.
_NEEDING = {
    "--fp4-param-gather": "--fp4-format",
    "--moe-enable-deepep": "--moe-token-dispatcher-type flex",
    "--moe-pad-expert-input-to-capacity": "--moe-expert-capacity-factor",
    "--fsdp-manual-registration": "--use-megatron-fsdp",
    "--ep-overlap-early-attn-memory-release": "--overlap-moe-expert-parallel-comm",
    "--inference-fuse-tp-communication": "--transformer-impl inference_optimized",
    "--inference-disable-triton-nvls-kernels": "--transformer-impl inference_optimized",
}


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


def stops_together(text: str, remedy: str) -> Refused:
    """Return the rule of one row of `STOPS`."""
    conditions = text.split(", ")
    option = conditions[0].split()[0]
    against = " and ".join(filter(None, (describe(condition, option) for condition in conditions)))
    return _stops(option, against, lambda args: all(holds(one, args) for one in conditions), remedy)


def _has_other_losses(args: Namespace) -> bool:
    losses = items_of(args.moe_router_load_balancing_type)
    return len(losses) > 1 and len(losses) != len(items_of(args.moe_aux_loss_coeff))


def _has_no_experts(args: Namespace) -> bool:
    all_layers = args.moe_layer_freq in (None, 1) or 0 not in items_of(args.moe_layer_freq)
    return args.moe_ffn_hidden_size is not None and not args.num_experts and all_layers


def _is_no_list(args: Namespace) -> bool:
    iterations = getattr(args, "phase_transition_iterations", None) or "0"
    return not all(part.strip().isdigit() for part in iterations.split(","))


OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    "What Megatron refuses": (
        *(stops_together(text, remedy) for text, remedy in STOPS.items()),
        *(
            given(option, f"Megatron takes it beside {needed} only, which no plan trains with")
            for option, needed in _NEEDING.items()
        ),
        _stops(
            "--moe-aux-loss-coeff",
            "another number of balancing losses",
            _has_other_losses,
            "give one coefficient for each of --moe-router-load-balancing-type",
        ),
        _stops(
            "--moe-ffn-hidden-size",
            "--num-experts left out",
            _has_no_experts,
            "give --num-experts, or leave it out",
        ),
        _stops("--phase-transition-iterations", "other than numbers", _is_no_list, "give numbers: 100,200"),
        Refused(
            "--log-interval",
            lambda args: args.log_interval < 1,
            "the training loop divides by it",
            "give 1 or more",
            "below 1",
        ),
        given(
            "--init-method-xavier-uniform",
            "Megatron's configuration lacks the field that it sets",
            "give --init-method-std in its place",
            ">=0.19",
        ),
    )
}
