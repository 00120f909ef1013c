"""Options of Megatron beside a plan: each is either carried out, as a test shows, or refused by name.

This is the one list that the checks, the documentation (docs/options.md) and the tests read. An option that
meets context parallelism and stands in neither part of it is a mistake.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.option_kinds import (
    Refused,
    Supported,
    before_0_19,
    beside_unequal,
    given,
    one_of,
    other_than,
    shown,
    with_fused_rotary,
)
from megatron_hexi.patching import is_installed

_UNEQUAL = "tests/megatron/test_unequal_replicas.py::test_training_is_that_of_one_rank[{}]"


def _gathers_or_is_flexible(args: Namespace) -> bool:
    kind = args.moe_token_dispatcher_type
    return kind == "flex" or (kind == "allgather" and args.expert_model_parallel_size > 1)


def _balances_sequences(args: Namespace) -> bool:
    kind = args.moe_router_load_balancing_type
    return bool(args.num_experts) and "seq_aux_loss" in (kind if isinstance(kind, list) else [kind])


def masks_documents(args: Namespace) -> bool:
    """Whether ``--dataloader-inter-document-masking`` is given; Megatron has it since 0.19."""
    return getattr(args, "dataloader_inter_document_masking", False)


def _is_packed(args: Namespace) -> bool:
    return masks_documents(args) or args.sft


def _hybrid_layers(args: Namespace) -> str:
    return args.hybrid_layer_pattern or args.hybrid_override_pattern or ""


_UNSHOWN = "it was not shown to be exact under a plan yet"
_DRAWS = "its draws would depend on the plan"
_CAPTURE = "the exchange between groups is not captured yet"

#: Every option that meets context parallelism, by what it is about.
OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    "Attention": (
        shown("--group-query-attention, --num-query-groups", "recompute-full-groups"),
        shown("--qk-layernorm", "qk-norm-groups"),
        shown("--qk-l2-norm", "qk-l2-norm-groups"),
        shown("--attention-output-gate, --add-qkv-bias", "gated-attention-groups"),
        given("--attention-dropout", _DRAWS, "give --attention-dropout 0"),
        shown("--window-size", "windows-groups", "keys that no query of another group sees do not travel"),
        Refused(
            "--window-size",
            lambda args: args.window_size is not None and args.window_size[1] != 0,
            "a causal query sees no later keys",
            "give --window-size N,0",
            "with a second number other than 0",
        ),
        shown("--window-attn-skip-freq", "alternating-windows-groups"),
        shown("--softmax-type off-by-one, learnable", "sinks-groups"),
        shown(
            "--multi-latent-attention",
            "latent-groups",
            "a plan has head_dim, of keys, and value_dim: `hexi proportion --value-dim`",
        ),
        Refused(
            "--multi-latent-attention",
            lambda args: args.multi_latent_attention and (args.apply_rope_fusion or _is_packed(args)),
            "the fused rotary kernel and packed values know equal shards only",
            "give --no-rope-fusion, and neither --dataloader-inter-document-masking nor --sft",
            "without --no-rope-fusion, or with --dataloader-inter-document-masking or --sft",
        ),
        given("--experimental-attention-variant", "its layers are not cut by a plan"),
        given("--qk-clip", "the largest logit is not tracked over blocks"),
        given("--log-max-attention-logit", "the largest logit is not tracked over blocks"),
        given("--use-kitchen-attention", "a plan brings its own kernels", "choose one with --hexi-kernel"),
        Refused(
            "--attention-backend",
            lambda args: getattr(getattr(args, "attention_backend", None), "name", "auto") != "auto",
            "a plan brings its own kernels",
            "choose one with --hexi-kernel",
            "any but auto",
        ),
        given("--batch-invariant-mode", "Megatron supports it without context parallelism only"),
    ),
    "Positions": (
        shown("--position-embedding-type rope", "recompute-full-groups"),
        shown("--rotary-percent, --rotary-base, --rotary-interleaved", "rope-variants-groups"),
        shown("--rotary-seq-len-interpolation-factor", "rope-variants-groups"),
        shown("--use-rope-scaling, --no-rope-freq", "rope-scaling-groups"),
        shown("--position-embedding-type yarn", "yarn-groups"),
        shown("--position-embedding-type learned_absolute", "learned-positions-groups"),
        shown("--position-embedding-type none", "no-positions-groups"),
        one_of(
            ("mrope", "relative"),
            "--position-embedding-type",
            "mrope and relative positions are not taken at the plan's positions yet",
            "use rope, yarn, learned_absolute or none",
        ),
    ),
    "Masks and packing": (
        shown(
            "--reset-position-ids, --eod-mask-loss",
            "learned-positions-groups",
            "positions count from the document's start where they are learned; rotary ones never do",
        ),
        shown(
            "--dataloader-inter-document-masking",
            "documents-groups",
            "each document is cut over all groups, so that each has its part of the work",
        ),
        Supported(
            "--sft",
            "tests/megatron/test_conversations.py::test_packed_conversations_train_as_on_one_rank[windows-sinks]",
            "conversations are cut as documents are",
        ),
        before_0_19("--sft", lambda args: args.sft),
        with_fused_rotary("--dataloader-inter-document-masking"),
        with_fused_rotary("--sft"),
        Refused(
            "--eval-iters",
            lambda args: args.sft and args.eval_iters != 0,
            "Megatron averages such losses over ranks, as if all had equal parts of a sequence",
            "give --eval-iters 0 and --split 100,0,0",
            "other than 0 with --sft",
        ),
        Refused(
            "--micro-batch-size",
            lambda args: _is_packed(args) and args.micro_batch_size > 1,
            "Megatron lays the samples of a packed batch out as one sequence",
            "give --micro-batch-size 1",
            "above 1 with --dataloader-inter-document-masking or --sft",
        ),
        given(
            "--reset-attention-mask",
            "a plan makes its own masks",
            "give --dataloader-inter-document-masking in its place",
        ),
        given("--decoder-seq-length", "a plan has one sequence length"),
    ),
    "Other ways to cut the sequence": (
        other_than(["p2p"], "--cp-comm-type", "the plan says how ranks exchange", "leave it out"),
        given("--hybrid-context-parallel", "the plan says which ranks share a sequence"),
        given("--max-seqlen-per-dp-cp-rank", "the plan says how many tokens a rank holds", "leave it out"),
        given("--hierarchical-context-parallel-sizes", "the plan says how ranks exchange", "leave it out"),
    ),
    "Tensor parallelism": (
        shown("--tensor-model-parallel-size", "tensor-parallel-groups"),
        shown(
            "--sequence-parallel",
            "sequence-parallel-groups",
            "shards that the size does not divide are padded outside attention",
        ),
        given("--tp-comm-overlap", "its buffers have the size of an equal shard"),
        Refused(
            "--tensor-parallel-num-weight-shards",
            lambda args: (
                (getattr(args, "tensor_parallel_num_weight_shards", None) or 0)
                > args.tensor_model_parallel_size
            ),
            _UNSHOWN,
            values="more than --tensor-model-parallel-size",
        ),
        Refused(
            "--expert-tensor-parallel-num-weight-shards",
            lambda args: (
                (getattr(args, "expert_tensor_parallel_num_weight_shards", None) or 0)
                > (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
            ),
            _UNSHOWN,
            values="more than --expert-tensor-parallel-size",
        ),
    ),
    "Pipeline parallelism": (
        shown("--pipeline-model-parallel-size", "pipeline-groups"),
        shown("--num-layers-per-virtual-pipeline-stage", "virtual-pipeline-groups"),
        shown(
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers", "uneven-stages-groups"
        ),
        shown("--pipeline-model-parallel-layout", "stage-layout-groups"),
        Refused(
            "--use-tp-pp-dp-mapping",
            lambda args: args.use_tp_pp_dp_mapping and args.pipeline_model_parallel_size > 1,
            "Megatron deals ranks so without context parallelism only",
            "leave it out",
            "with --pipeline-model-parallel-size above 1",
        ),
    ),
    "Data parallelism": (
        shown(
            "several replicas",
            "distributed-optimizer-replicas",
            "as many ranks each; their groups, shards and heads may differ",
        ),
        shown(
            "--use-distributed-optimizer, --overlap-grad-reduce, --overlap-param-gather",
            "distributed-optimizer-replicas",
        ),
        shown("--ddp-bucket-size", "small-buckets-replicas"),
        other_than(1, "--num-distributed-optimizer-instances", _UNSHOWN),
        given("--ddp-average-in-collective", "it averages over ranks, a plan over tokens"),
        given("--use-torch-fsdp2", _UNSHOWN),
        given("--use-megatron-fsdp", _UNSHOWN),
    ),
    "Unequal replicas": (
        Supported(
            "other numbers of ranks, other shares of the batch, ranks in any order",
            _UNEQUAL.format("two-and-one"),
            "all ranks form one context-parallel group of Megatron's; no rank computes another's sequences",
        ),
        Supported("--tensor-model-parallel-size, --sequence-parallel", _UNEQUAL.format("sequence-parallel")),
        Supported("--pipeline-model-parallel-size", _UNEQUAL.format("pipeline")),
        Supported(
            "--num-layers-per-virtual-pipeline-stage",
            _UNEQUAL.format("virtual-pipeline"),
            "each replica takes a multiple of --pipeline-model-parallel-size micro-batches",
        ),
        Supported(
            "--use-distributed-optimizer, --overlap-grad-reduce, --overlap-param-gather",
            _UNEQUAL.format("distributed-optimizer"),
        ),
        Supported("--recompute-granularity full", _UNEQUAL.format("recompute")),
        Supported("--mtp-num-layers", _UNEQUAL.format("multi-token")),
        Supported("--window-size, --softmax-type", _UNEQUAL.format("windows-sinks")),
        Supported("--dataloader-inter-document-masking", _UNEQUAL.format("documents")),
        Supported("--dataloader-type cyclic", _UNEQUAL.format("cyclic")),
        beside_unequal(
            "--num-experts",
            lambda args: bool(args.num_experts),
            "routers and experts join ranks that run different numbers of micro-batches",
            "make a plan with equal replicas: --data-parallel N in place of auto",
        ),
        beside_unequal(
            "--sft",
            lambda args: args.sft,
            "Megatron pads conversations by the context-parallel size, and averages their losses over ranks",
            "make a plan with equal replicas: --data-parallel N in place of auto",
        ),
        beside_unequal(
            "--dataloader-type",
            lambda args: args.dataloader_type == "external",
            "an external loader does not know which sequences are a replica's",
            "use single or cyclic",
            "external",
        ),
        beside_unequal(
            "--eval-global-batch-size",
            lambda args: getattr(args, "eval_global_batch_size", None) not in (None, args.global_batch_size),
            "replicas take what they take in training",
            "leave it out",
            "any but --global-batch-size",
        ),
        beside_unequal(
            "--eval-micro-batch-size",
            lambda args: getattr(args, "eval_micro_batch_size", None) not in (None, args.micro_batch_size),
            "replicas take what they take in training",
            "leave it out",
            "any but --micro-batch-size",
        ),
        beside_unequal(
            "--iterations-to-skip",
            lambda args: bool(args.iterations_to_skip),
            "a skipped iteration draws as many micro-batches on all ranks",
            "train without it",
        ),
    ),
    "Batches": (
        shown("--global-batch-size", "accumulation-replicas", "gradients of several micro-batches add up"),
        shown(
            "--step-batch-size-schedule",
            "batch-schedule-groups",
            "with equal replicas that do not state their micro_batches",
        ),
        given("--rampup-batch-size", "Megatron ignores it", "give --step-batch-size-schedule", since="0.18"),
        Refused(
            "--rampup-batch-size", lambda args: args.rampup_batch_size is not None, _UNSHOWN, versions="<0.18"
        ),
        Supported(
            "--eval-iters, --eval-interval",
            "tests/megatron/test_option_training.py::test_evaluation_gives_the_loss_without_a_plan",
        ),
        given("--full-validation", _UNSHOWN),
        given("--multiple-validation-sets", _UNSHOWN),
    ),
    "Memory": (
        shown("--recompute-granularity full", "recompute-full-groups"),
        shown("--recompute-method block", "recompute-block-groups"),
        shown("--recompute-granularity selective", "recompute-selective-groups"),
        shown("--recompute-modules core_attn, mlp, moe", "recompute-modules-groups"),
        shown("--distribute-saved-activations", "saved-activations-groups"),
        given("--fine-grained-activation-offloading", _UNSHOWN),
        given("--cpu-offloading-num-layers", _UNSHOWN),
        shown("--mlp-chunks-for-training", "chunked-layers-groups"),
    ),
    "Mixture of experts": (
        shown("--num-experts, --moe-aux-loss-coeff", "experts-groups"),
        shown("--moe-router-load-balancing-type seq_aux_loss", "experts-seq-loss-groups"),
        shown("--moe-router-load-balancing-type global_aux_loss", "experts-global-loss-groups"),
        shown("--moe-z-loss-coeff", "experts-z-loss-groups"),
        shown("--moe-router-enable-expert-bias", "experts-bias-groups"),
        shown("--moe-token-dispatcher-type alltoall", "experts-groups"),
        shown("--expert-model-parallel-size", "experts-parallel-replicas"),
        shown("--expert-tensor-parallel-size", "experts-tensor-parallel-groups"),
        shown("--moe-shared-expert-intermediate-size", "experts-shared-groups"),
        shown("--moe-layer-freq, --moe-router-num-groups, --moe-router-group-topk", "experts-grouped-groups"),
        one_of(
            ("sinkhorn", "quantile_balancing"),
            "--moe-router-load-balancing-type",
            "it balances the tokens of a rank, as if all had equal parts of a sequence",
            "use aux_loss, seq_aux_loss, global_aux_loss or none",
        ),
        Refused(
            "--moe-router-load-balancing-type",
            lambda args: args.micro_batch_size > 1 and _balances_sequences(args),
            "before 0.19 Megatron divides it by the micro-batch size under --calculate-per-token-loss",
            "install megatron-core 0.19, or give --micro-batch-size 1",
            "seq_aux_loss with --micro-batch-size above 1",
            versions="<0.19",
        ),
        shown("--moe-token-dispatcher-type allgather, experts on one rank", "experts-gathered-groups"),
        Refused(
            "--moe-token-dispatcher-type",
            lambda args: bool(args.num_experts) and _gathers_or_is_flexible(args),
            "it takes equal shards, or was not shown to be exact under a plan yet",
            "give --moe-token-dispatcher-type alltoall",
            "flex; allgather with --expert-model-parallel-size above 1",
        ),
        given("--moe-expert-capacity-factor", "which tokens an expert drops would depend on the plan"),
        given("--moe-expert-rank-capacity-factor", "which tokens an expert drops would depend on the plan"),
        given("--moe-input-jitter-eps", _DRAWS),
        given("--moe-router-force-load-balancing", _DRAWS),
        given("--moe-router-force-biased", _DRAWS),
        given("--moe-enable-routing-replay", "recorded routes are not cut by a plan"),
        given("--moe-paged-stash", _UNSHOWN),
        given("--moe-shared-expert-overlap", _UNSHOWN),
        given("--overlap-moe-expert-parallel-comm", _UNSHOWN),
    ),
    "Layers and losses": (
        shown("--untie-embeddings-and-output-weights", "untied-groups"),
        shown("--cross-entropy-loss-fusion", "fused-loss-groups"),
        shown("--use-mup", "maximal-update-groups"),
        shown("--mtp-num-layers, --mtp-loss-scaling-factor", "multi-token-groups"),
        Refused(
            "--mtp-num-layers",
            lambda args: (
                bool(args.mtp_num_layers) and (args.pipeline_model_parallel_size > 1 or _is_packed(args))
            ),
            "it was not shown to be exact over pipeline stages, nor within documents",
            "give --pipeline-model-parallel-size 1, and no --dataloader-inter-document-masking or --sft",
            "with --pipeline-model-parallel-size above 1, --dataloader-inter-document-masking or --sft",
        ),
        given("--hidden-dropout", _DRAWS, "give --hidden-dropout 0"),
        shown("--hybrid-layer-pattern of attention (*) and MLP (-) layers", "hybrid-model-groups"),
        before_0_19("--hybrid-layer-pattern", lambda args: bool(_hybrid_layers(args))),
        Refused(
            "--hybrid-layer-pattern",
            lambda args: not set(_hybrid_layers(args)) <= set("*-|"),
            "its layers are not cut by a plan yet",
            "use attention and MLP layers only",
            "with other layers than * and -",
        ),
        Refused(
            "--is-hybrid-model",
            lambda args: args.is_hybrid_model and not _hybrid_layers(args),
            "it does not say which layers there are",
            "give --hybrid-layer-pattern",
            "without --hybrid-layer-pattern",
        ),
        Refused(
            "--heterogeneous-layers-config-path",
            lambda args: bool(
                getattr(args, "heterogeneous_layers_config_path", None)
                or getattr(args, "heterogeneous_layers_config_encoded_json", None)
            ),
            "a plan has one number of heads for all layers",
        ),
        given("--logits-load-dir", "the stored logits are not cut by a plan"),
        given("--logits-save-dir", "logits are stored by equal shards"),
        given("--perform-rl-step", "generation is not cut by a plan"),
    ),
    "Number formats and graphs": (
        Supported(
            "--bf16",
            "tests/megatron/test_uneven_training.py::test_bf16_is_as_near_as_even_shards_are",
            "as near to one rank as even shards are",
        ),
        given("--fp8-format", "its rows are not padded to what fp8 needs yet", name="fp8"),
        given("--fp4-format", "its rows are not padded to what fp4 needs yet", name="fp4"),
        other_than("none", "--cuda-graph-impl", _CAPTURE),
        given("--enable-cuda-graph", _CAPTURE),
        given("--external-cuda-graph", _CAPTURE),
    ),
    "Checkpoints": (
        Supported(
            "--ckpt-format torch_dist",
            "tests/megatron/test_checkpoints.py::test_training_goes_on_under_any_plan_and_parallelism[another-plan]",
            "saved under any plan, loaded under any other or none",
        ),
        Supported(
            "stock Megatron",
            "tests/megatron/test_checkpoints.py::test_stock_megatron_loads_what_a_plan_saved",
            "where this package cannot be imported: nothing of it is in a checkpoint",
        ),
    ),
}


def supported() -> list[Supported]:
    """All that a plan carries out."""
    return [option for options in OPTIONS.values() for option in options if isinstance(option, Supported)]


def refused() -> list[Refused]:
    """All that is refused."""
    return [option for options in OPTIONS.values() for option in options if isinstance(option, Refused)]


def refuse_yaml_configuration(argv: Sequence[str]) -> None:
    """Refuse ``--yaml-cfg`` beside a plan, before Megatron parses: it drops every flag, ours too.

    Raises:
        PlanError: both are on the command line.
    """
    flags = {word.partition("=")[0] for word in argv}
    if {"--yaml-cfg", "--hexi-plan"} <= flags:
        raise PlanError(
            "--yaml-cfg does not work with --hexi-plan: it replaces the command line that a plan is checked "
            "against; give flags"
        )


def refuse_unsupported(args: Namespace, unequal: bool) -> None:
    """Refuse the first option of the job that a plan does not carry out.

    Args:
        args: Megatron's arguments.
        unequal: whether the plan's replicas are unequal.

    Raises:
        PlanError: with the option, the reason and the remedy.
    """
    for option in refused():
        applies = (unequal or not option.unequal) and (not option.versions or is_installed(option.versions))
        if applies and option.used(args):
            beside = "unequal replicas" if option.unequal else "--hexi-plan"
            raise PlanError(f"{option.option} does not work with {beside}: {option.reason}; {option.remedy}")
