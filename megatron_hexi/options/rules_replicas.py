"""Rules for options in jobs whose plan has unequal replicas."""

from __future__ import annotations

from megatron_hexi.options.kinds import Refused, Supported, beside_unequal

_UNEQUAL = "tests/megatron/test_unequal_replicas.py::test_training_is_that_of_one_rank[{}]"

OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
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
}
