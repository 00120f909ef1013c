"""Rules for options of tensor, pipeline, context and data parallelism, unequal replicas and stages."""

from __future__ import annotations

from functools import partial

from megatron_hexi.options.kinds import (
    UNSHOWN,
    Refused,
    Supported,
    beside_stages,
    beside_unequal,
    given,
    is_given,
    shown,
)
from megatron_hexi.options.rules_replaced import keeps_fp32_state

_UNEQUAL = "tests/megatron/test_unequal_replicas.py::test_training_is_that_of_one_rank[{}]"

_JOBS = "tests/megatron/test_stages_jobs.py::"

_CHECKPOINTS = _JOBS + "test_any_layout_goes_on_from_any_other[{}]"

_STATES = "tests/megatron/test_stages_states.py::test_training_is_that_of_one_rank[{}]"

OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    "Other ways to cut the sequence": (
        given("--hybrid-context-parallel", "the plan says which ranks share a sequence"),
        given("--max-seqlen-per-dp-cp-rank", "the plan says how many tokens a rank holds", "leave it out"),
    ),
    "Tensor parallelism": (
        shown("--tensor-model-parallel-size", "tensor-parallel-groups"),
        shown(
            "--sequence-parallel",
            "sequence-parallel-groups",
            "shards that the size does not divide are padded outside attention",
        ),
        Refused(
            "--tensor-parallel-num-weight-shards",
            lambda args: (
                (getattr(args, "tensor_parallel_num_weight_shards", None) or 0)
                > args.tensor_model_parallel_size
            ),
            UNSHOWN,
            values="more than --tensor-model-parallel-size",
        ),
        Refused(
            "--expert-tensor-parallel-num-weight-shards",
            lambda args: (
                (getattr(args, "expert_tensor_parallel_num_weight_shards", None) or 0)
                > (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
            ),
            UNSHOWN,
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
        given("--use-torch-fsdp2", UNSHOWN),
        given("--use-megatron-fsdp", UNSHOWN),
    ),
    "Unequal replicas": (
        Supported(
            "other numbers of ranks, other shares of the batch, ranks in any order",
            _UNEQUAL.format("two-and-one"),
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
        Refused(
            "--num-experts",
            lambda args: bool(args.num_experts),
            "routers and experts join ranks that run different numbers of micro-batches",
            "give the stages layers: [0, L], or make a plan with equal replicas",
            beside="repeated",
        ),
        beside_unequal(
            "--sft",
            lambda args: args.sft,
            "Megatron pads conversations by the context-parallel size, and averages their losses over ranks",
            "make a plan with --no-unequal-replicas --no-unequal-stages",
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
            "evaluation uses the replicas' shares of training",
            "leave it out",
            "any but --global-batch-size",
        ),
        beside_unequal(
            "--eval-micro-batch-size",
            lambda args: getattr(args, "eval_micro_batch_size", None) not in (None, args.micro_batch_size),
            "evaluation uses the replicas' shares of training",
            "leave it out",
            "any but --micro-batch-size",
        ),
        beside_unequal(
            "--iterations-to-skip",
            lambda args: bool(args.iterations_to_skip),
            "a skipped iteration reads the same number of micro-batches on all ranks",
            "train without it",
        ),
    ),
    "Stages that differ": (
        Supported(
            "layers, tensor-parallel size, domain, samples and state of a stage's own",
            "tests/megatron/test_stages_jobs.py::test_stages_recompute_each_in_its_own_way[layers]",
            "--sequence-parallel holds for units of several ranks",
        ),
        Supported(
            "--recompute-granularity full|selective",
            _JOBS + "test_stages_recompute_each_in_its_own_way[layers]",
            "or as each stage of the plan says",
        ),
        Supported(
            "--dataloader-inter-document-masking",
            _JOBS + "test_documents_travel_over_borders_of_other_domains",
        ),
        Supported(
            "--hexi-batch-shares, also with --num-experts and --mtp-num-layers",
            "tests/megatron/test_dealt_stages.py::test_training_is_that_of_one_rank[all]",
            "each domain assigns the same documents by the rates of its own units",
        ),
        Supported(
            "--use-distributed-optimizer, --overlap-grad-reduce",
            _JOBS + "test_gradients_are_summed_behind_the_backward_pass",
        ),
        Supported(
            "--log-params-norm",
            _JOBS + "test_the_norm_of_all_weights_is_that_of_one_rank[units-bf16-distributed]",
        ),
        Supported("--bf16", _JOBS + "test_bf16_is_no_further_from_fp32_than_one_rank_is"),
        Supported(
            "--fp16",
            "tests/megatron/test_fp16.py::test_scale_steps_and_losses_are_those_of_one_rank[units]",
            "with the loss scale and the skipped steps of one rank",
        ),
        Supported(
            "--ckpt-format torch_dist",
            _CHECKPOINTS.format("one-rank-to-units-fp32"),
            "from and to any layout, and stock Megatron, with --dist-ckpt-optim-fully-reshardable",
        ),
        Supported(
            "--experimental-attention-variant gated_delta_net",
            _STATES.format("gpt-experts"),
            "in domains of one group where a stage has delta nets; with experts too",
        ),
        Supported(
            "--hybrid-layer-pattern",
            _STATES.format("hybrid-depths"),
            "cut by the layers of each stage; in domains of one group where a stage has M or G",
        ),
        Supported(
            "--mtp-num-layers, --mtp-loss-scaling-factor",
            "tests/megatron/test_stages_multi_token.py::test_training_is_that_of_one_rank[replicas]",
            "on the last stage of every replica",
        ),
        Supported(
            "--mtp-num-layers with --num-experts",
            "tests/megatron/test_stages_further_experts.py::test_training_is_that_of_one_rank[samples-all]",
            "with experts on any ranks of the last stage",
        ),
        beside_stages(
            "--mtp-num-layers",
            lambda args: bool(args.mtp_num_layers),
            "Megatron holds and numbers these layers differently before 0.19",
            "install megatron-core 0.19, or train without it",
            versions="<0.19",
        ),
        beside_stages(
            "--mtp-detach-heads",
            lambda args: getattr(args, "mtp_detach_heads", False),
            "the gradients of these layers are clipped by a norm of their own",
        ),
        beside_stages(
            "--optimizer",
            lambda args: args.optimizer not in ("adam", "sgd"),
            "it updates whole weights, which no rank owns",
            "use adam or sgd",
            "any but adam and sgd",
        ),
        beside_stages(
            "--use-precision-aware-optimizer",
            lambda args: getattr(args, "use_precision_aware_optimizer", False) and not keeps_fp32_state(args),
            "states of stages are in fp32",
            "leave out --main-grads-dtype, --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype",
            "with states in other types than fp32",
        ),
        beside_stages(
            "--ckpt-format",
            lambda args: args.ckpt_format != "torch_dist",
            "it stores what a rank holds by Megatron's grid of ranks",
            "use torch_dist",
            "any but torch_dist",
        ),
        beside_stages(
            "--non-persistent-ckpt-type",
            lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local",
            "it stores what a rank holds by Megatron's grid of ranks",
            "use global",
            "local",
        ),
        *(
            beside_stages(option, partial(is_given, flag=option), UNSHOWN)
            for option in (
                "--mtp-use-repeated-layer",
                "--load-main-params-from-ckpt",
                "--data-parallel-random-init",
                "--check-weight-hash-across-dp-replicas-interval",
                "--moe-latent-size",
                "--moe-use-upcycling",
            )
        ),
    ),
}
