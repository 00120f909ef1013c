"""Rules for options of attention, positions and masks."""

from __future__ import annotations

from megatron_hexi.options.kinds import (
    DRAWS,
    Refused,
    Supported,
    before_0_19,
    given,
    is_packed,
    one_of,
    other_than,
    shown,
)

OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    "Attention": (
        shown("--group-query-attention, --num-query-groups", "recompute-full-groups"),
        shown("--qk-layernorm", "qk-norm-groups"),
        shown("--qk-l2-norm", "qk-l2-norm-groups"),
        shown("--attention-output-gate, --add-qkv-bias", "gated-attention-groups"),
        given("--attention-dropout", DRAWS, "give --attention-dropout 0"),
        shown("--window-size", "windows-groups"),
        Refused(
            "--window-size",
            lambda args: args.window_size is not None and args.window_size[1] != 0,
            "a causal query sees no later keys",
            "give --window-size N,0",
            "with a second number other than 0",
        ),
        shown("--window-attn-skip-freq", "alternating-windows-groups"),
        shown("--softmax-type off-by-one|learnable", "sinks-groups"),
        shown(
            "--multi-latent-attention",
            "latent-groups",
            "`hexi plan` knows it from the model; `hexi proportion` needs `--v-head-dim`",
        ),
        Refused(
            "--multi-latent-attention",
            lambda args: args.multi_latent_attention and is_packed(args),
            "packed values support equal shards only",
            "leave out --dataloader-inter-document-masking and --sft",
            "with --dataloader-inter-document-masking or --sft",
        ),
        Supported(
            "--experimental-attention-variant gated_delta_net, --linear-*",
            "tests/megatron/test_state_layers.py::test_training_is_that_of_one_rank[gpt-uneven-heads]",
            "in domains of one group; each member scans as many of the value heads as it has of attention's",
        ),
        before_0_19(
            "--experimental-attention-variant", lambda args: bool(args.experimental_attention_variant)
        ),
        other_than(
            "gated_delta_net", "--experimental-attention-variant", "its layers are not sharded by a plan"
        ),
        given("--qk-clip", "the largest logit is not tracked over blocks"),
        given("--log-max-attention-logit", "the largest logit is not tracked over blocks"),
        given("--use-kitchen-attention", "a plan brings its own kernels", "choose one with --hexi-kernel"),
        given("--batch-invariant-mode", "Megatron supports it without context parallelism only"),
    ),
    "Positions": (
        shown("--position-embedding-type rope", "recompute-full-groups"),
        shown("--rotary-percent, --rotary-base, --rotary-interleaved", "rope-variants-groups"),
        shown("--rotary-seq-len-interpolation-factor", "rope-variants-groups"),
        shown("--use-rope-scaling, --no-rope-freq", "rope-scaling-groups"),
        # gpt_config_from_args (megatron/training/argument_utils.py, 0.19) does not copy the factor.
        Refused(
            "--rope-scaling-factor",
            lambda args: args.use_rope_scaling and args.rope_scaling_factor != 8,
            "Megatron ignores it and builds the model with 8",
            "leave it out, and train models with that factor only",
            "any but 8, with --use-rope-scaling",
        ),
        shown("--position-embedding-type yarn", "yarn-groups"),
        shown("--position-embedding-type learned_absolute", "learned-positions-groups"),
        shown("--position-embedding-type none", "no-positions-groups"),
        Supported(
            "--position-embedding-type mrope, --mrope-section",
            "tests/megatron/test_vision_loop.py::test_losses_and_weights_are_those_of_one_rank[replicas]",
            "in a script whose model is given positions on three axes, [3, B, S], of whole sequences",
        ),
        before_0_19("--mrope-section", lambda args: bool(getattr(args, "mrope_section", None))),
        Refused(
            "--mrope-section",
            lambda args: (
                bool(getattr(args, "mrope_section", None))
                and bool(args.mtp_num_layers or args.rotary_interleaved)
            ),
            "it is supported without further tokens and interleaved pairs only",
            "leave the others out",
            "with --mtp-num-layers or --rotary-interleaved",
        ),
        one_of(
            ("relative",),
            "--position-embedding-type",
            "relative positions are not taken at the plan's positions yet",
            "use rope, mrope, yarn, learned_absolute or none",
        ),
        Refused(
            "--position-embedding-type",
            lambda args: args.position_embedding_type == "mrope",
            "its data sets have positions on one axis; of text, rope is the same",
            "use rope, or a script whose batches have three",
            "mrope",
            beside="script",
        ),
    ),
    "Masks and packing": (
        shown(
            "--reset-position-ids, --eod-mask-loss",
            "learned-positions-groups",
            "learned positions count from the document's start; rotary ones never do",
        ),
        shown(
            "--dataloader-inter-document-masking", "documents-groups", "each document is cut over all groups"
        ),
        shown(
            "--hexi-batch-shares",
            "documents-dealt-groups",
            "without layers that have a state, re-planning and elastic training",
        ),
        shown("--hexi-batch-shares with --pipeline-model-parallel-size", "documents-dealt-pipeline-groups"),
        shown("--hexi-batch-shares with --num-experts", "documents-dealt-experts-replicas"),
        Supported(
            "--sft",
            "tests/megatron/test_conversations.py::test_packed_conversations_train_as_on_one_rank[windows-sinks]",
            "each document is cut over all groups",
        ),
        before_0_19("--sft", lambda args: args.sft),
        Refused(
            "--eval-iters",
            lambda args: args.sft and args.eval_iters != 0,
            "Megatron averages such losses over ranks, as if all had equal parts of a sequence",
            "give --eval-iters 0 and --split 100,0,0",
            "other than 0 with --sft",
        ),
        Refused(
            "--micro-batch-size",
            lambda args: is_packed(args) and args.micro_batch_size > 1,
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
}
