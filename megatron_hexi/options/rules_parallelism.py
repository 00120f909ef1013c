"""Rules for options of tensor, pipeline, context and data parallelism."""

from __future__ import annotations

from megatron_hexi.options.kinds import UNSHOWN, Refused, Supported, given, shown

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
}
