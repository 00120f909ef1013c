"""Rules for options of batches, memory, layers, number formats and checkpoints."""

from __future__ import annotations

from megatron_hexi.kinds import ShortConv
from megatron_hexi.kinds.states import STATES, hybrid_layers, layers_with_state
from megatron_hexi.options.kinds import (
    DRAWS,
    UNSHOWN,
    Refused,
    Supported,
    before_0_19,
    given,
    is_packed,
    one_of,
    shown,
)

_ONE_NUMBER_OF_HEADS = "a plan has one number of heads for all layers"

_MODULES = "tests/megatron/test_recomputed_modules.py::test_each_gradient"

OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    "Batches": (
        shown("--global-batch-size", "accumulation-replicas"),
        shown(
            "--step-batch-size-schedule",
            "batch-schedule-groups",
            "with equal replicas that do not state their micro_batches",
        ),
        given("--rampup-batch-size", "Megatron ignores it", "give --step-batch-size-schedule", ">=0.18"),
        Refused(
            "--rampup-batch-size", lambda args: args.rampup_batch_size is not None, UNSHOWN, versions="<0.18"
        ),
        Supported(
            "--eval-iters, --eval-interval",
            "tests/megatron/test_option_training.py::test_evaluation_gives_the_loss_without_a_plan",
        ),
        given("--full-validation", UNSHOWN),
        given("--multiple-validation-sets", UNSHOWN),
    ),
    "Memory": (
        shown("--recompute-granularity full", "recompute-full-groups"),
        shown("--recompute-method block", "recompute-block-groups"),
        shown("--recompute-granularity selective", "recompute-selective-groups"),
        Supported(
            "--recompute-modules core_attn|layernorm|moe|shared_experts",
            f"{_MODULES}_is_that_without[core_attn layernorm moe shared_experts]",
        ),
        Supported(
            "--recompute-modules mla_up_proj|mlp",
            f"{_MODULES}_is_that_without[mla_up_proj core_attn layernorm mlp]",
        ),
        Supported(
            "--recompute-modules moe_act", f"{_MODULES}_of_transformer_engine_is_that_without[moe_act]"
        ),
        Refused(
            "--recompute-modules",
            lambda args: (
                args.recompute_granularity == "selective"
                and "mlp" in (args.recompute_modules or ())
                and args.add_bias_linear
            ),
            "Megatron's MLP returns its bias, which leads the backward pass of a recomputed one into itself",
            "leave mlp out, or give --disable-bias-linear",
            "with mlp and without --disable-bias-linear",
        ),
        shown("--distribute-saved-activations", "saved-activations-groups"),
        shown("--mlp-chunks-for-training", "chunked-layers-groups"),
        Refused(
            "--mlp-chunks-for-training",
            lambda args: (
                getattr(args, "mlp_chunks_for_training", 1) > 1
                and args.transformer_impl == "transformer_engine"
                and args.gradient_accumulation_fusion
            ),
            "gradients of the MLP's weights come out wrong",
            "give --no-gradient-accumulation-fusion, or train without it",
            "with --transformer-impl transformer_engine and without --no-gradient-accumulation-fusion",
        ),
    ),
    "Layers and losses": (
        shown("--untie-embeddings-and-output-weights", "untied-groups"),
        shown("--cross-entropy-loss-fusion", "fused-loss-groups"),
        shown("--use-mup", "maximal-update-groups"),
        one_of(("inference_optimized",), "--transformer-impl", UNSHOWN, "give transformer_engine"),
        shown("--mtp-num-layers, --mtp-loss-scaling-factor", "multi-token-groups"),
        Refused(
            "--mtp-num-layers",
            lambda args: (
                bool(args.mtp_num_layers)
                and (args.pipeline_model_parallel_size > 1 or args.sft or bool(layers_with_state(args)))
            ),
            "it is not tested within conversations, beside layers with a state, or over pipeline stages "
            "without layers of their own",
            "train without it",
            "with --pipeline-model-parallel-size above 1, --sft, Mamba layers or delta nets",
        ),
        given("--hidden-dropout", DRAWS, "give --hidden-dropout 0"),
        shown("--hybrid-layer-pattern of * and -", "hybrid-model-groups"),
        Supported(
            "--hybrid-layer-pattern with M, --mamba-*",
            "tests/megatron/test_state_layers.py::test_training_is_that_of_one_rank[mamba-uneven-heads]",
            "in domains of one group; each member scans as many of the Mamba heads as it has of attention's",
        ),
        Supported(
            "--hybrid-layer-pattern with G, --linear-*",
            "tests/megatron/test_state_layers.py::test_training_is_that_of_one_rank[delta-uneven-heads]",
            "in domains of one group; each member scans as many of the value heads as it has of attention's",
        ),
        Supported(
            "--hybrid-layer-pattern with C, --linear-conv-kernel-dim",
            "tests/megatron/test_random_layouts.py::test_training_is_that_of_one_rank[convolution-0]",
            "LFM2's gated short convolutions, a layer of this package, of as many taps; in any domain",
        ),
        Supported(
            "--hybrid-layer-pattern with E",
            "tests/megatron/test_state_layers.py::test_training_is_that_of_one_rank[hybrid-experts]",
            "with the options of experts",
        ),
        given("--disable-mamba-mem-eff-path", UNSHOWN),
        before_0_19("--hybrid-layer-pattern", lambda args: bool(hybrid_layers(args))),
        Refused(
            "--hybrid-layer-pattern",
            lambda args: not set(hybrid_layers(args)) <= {*"*-E|", ShortConv.letter, *STATES},
            "its layers are not sharded by a plan yet",
            "use attention, MLP, Mamba, delta net, short convolution and expert layers only",
            "with other layers than *, -, M, G, C and E",
        ),
        Refused(
            "--num-experts",
            lambda args: bool(hybrid_layers(args)) and ("E" in hybrid_layers(args)) != bool(args.num_experts),
            "the layers with experts of a hybrid model are marked E in --hybrid-layer-pattern",
            "give both, or neither",
            "with a --hybrid-layer-pattern without E, or left out with E",
        ),
        # Megatron reads virtual stages from the pattern's segments, and refuses the flag beside it.
        Refused(
            "--num-layers-per-virtual-pipeline-stage",
            lambda args: (
                bool(hybrid_layers(args))
                and ("|" in hybrid_layers(args) or bool(args.num_layers_per_virtual_pipeline_stage))
            ),
            "segments of a hybrid model are not tested under a plan yet",
            "leave it out, and give --hybrid-layer-pattern without |",
            "with --hybrid-layer-pattern, or segments in its pattern",
        ),
        Refused(
            "--is-hybrid-model",
            lambda args: args.is_hybrid_model and not hybrid_layers(args),
            "it does not say which layers there are",
            "give --hybrid-layer-pattern",
            "without --hybrid-layer-pattern",
        ),
        given("--heterogeneous-layers-config-path", _ONE_NUMBER_OF_HEADS),
        given("--heterogeneous-layers-config-encoded-json", _ONE_NUMBER_OF_HEADS),
        given("--logits-load-dir", "the stored logits are not sharded by a plan"),
        given("--logits-save-dir", "logits are stored by equal shards"),
        given("--perform-rl-step", "generation is not sharded by a plan"),
    ),
    "Number formats and graphs": (
        Supported(
            "--deterministic-mode",
            "tests/megatron/test_option_training.py::test_two_runs_in_deterministic_mode_are_the_same_bits",
            "by kernels whose gradients are the same in every run: flash-attn-2, aten-flash, aten-cpu, math",
        ),
        Refused(
            "--deterministic-mode",
            lambda args: args.deterministic_mode and is_packed(args) and "G" in layers_with_state(args),
            "Megatron's deterministic scan of delta nets takes no documents",
            "leave out one of them",
            "with --dataloader-inter-document-masking or --sft, and delta net layers",
        ),
        Supported(
            "--bf16",
            "tests/megatron/test_uneven_training.py::test_bf16_is_as_near_to_fp32_as_one_rank_is",
            "as near to fp32 as bf16 on one rank is",
        ),
        Supported(
            "--fp16, --loss-scale, --initial-loss-scale",
            "tests/megatron/test_fp16.py::test_scale_steps_and_losses_are_those_of_one_rank[domain-of-two-groups]",
            "with the loss scale and the skipped steps of one rank",
        ),
        Supported(
            "--fp8-format, --fp8-recipe tensorwise|delayed|blockwise|mxfp8",
            "tests/megatron/test_fp8_training.py::test_gradients_are_as_near_to_fp32_as_on_one_rank[groups-tensorwise]",
            "as near to fp32 as fp8 on one rank is; units with precision: bf16 compute in bf16",
        ),
        Supported(
            "--first-last-layers-bf16, --num-layers-at-start-in-bf16, --num-layers-at-end-in-bf16",
            "tests/megatron/test_fp8_training.py::test_the_first_and_last_layers_of_the_model_are_in_bf16",
        ),
        Refused(
            "--fp8-format",
            lambda args: bool(args.fp8) and (not args.bf16 or args.transformer_impl != "transformer_engine"),
            "Transformer Engine's layers train in it, and a plan computes all else in bf16",
            "give --bf16 and --transformer-impl transformer_engine",
            "without --bf16 or --transformer-impl transformer_engine",
        ),
        one_of(("custom",), "--fp8-recipe", UNSHOWN, "give tensorwise, delayed, blockwise or mxfp8"),
        given("--fp8-param-gather", "a plan sends weights in bf16"),
        given("--fp8-output-proj", UNSHOWN),
        given("--no-fp8-wgrad", UNSHOWN),
        given("--te-precision-config-file", "the plan says which units compute in bf16"),
        given("--fp4-format", "its rows are not padded to what fp4 needs yet"),
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
            "loads what a plan saved, without this package",
        ),
    ),
}
