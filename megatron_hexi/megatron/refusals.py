"""Options of Megatron that a plan does not carry out: each is refused by name, none is ignored.

Every entry is an option that meets context parallelism and was not shown to give the right result under
uneven shards. Its place here is the one list that the checks and the documentation read.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_hexi.errors import PlanError


@dataclass(frozen=True)
class Refusal:
    """One option that is refused.

    Args:
        option: the flag, as written on the command line.
        used: whether the job uses it.
        reason: why a plan cannot carry it out.
        remedy: what to do instead.
    """

    option: str
    used: Callable[[Namespace], bool]
    reason: str
    remedy: str = "train without it"


def _given(name: str) -> Callable[[Namespace], bool]:
    """Whether an option is set to anything but nothing."""
    return lambda args: bool(getattr(args, name, None))


def _differs(name: str, usual: object) -> Callable[[Namespace], bool]:
    """Whether an option has another value than the usual one."""
    return lambda args: getattr(args, name, usual) not in (usual, None)


REFUSALS: tuple[Refusal, ...] = (
    # Attention
    Refusal(
        "--attention-dropout",
        _given("attention_dropout"),
        "its mask would depend on the plan",
        "give --attention-dropout 0",
    ),
    Refusal("--window-size", _given("window_size"), "blocks between groups have no window yet"),
    Refusal("--softmax-type", _differs("softmax_type", "vanilla"), "sinks are not merged over blocks yet"),
    Refusal(
        "--multi-latent-attention",
        _given("multi_latent_attention"),
        "keys and values of different size are not exchanged yet",
    ),
    Refusal(
        "--experimental-attention-variant",
        _given("experimental_attention_variant"),
        "its layers are not cut by a plan",
    ),
    Refusal("--qk-clip", _given("qk_clip"), "the largest logit is not tracked over blocks"),
    Refusal(
        "--log-max-attention-logit",
        _given("log_max_attention_logit"),
        "the largest logit is not tracked over blocks",
    ),
    Refusal(
        "--use-kitchen-attention",
        _given("use_kitchen_attention"),
        "a plan brings its own kernels",
        "choose one with --hexi-kernel",
    ),
    Refusal(
        "--attention-backend",
        lambda args: getattr(getattr(args, "attention_backend", None), "name", "auto") != "auto",
        "a plan brings its own kernels",
        "choose one with --hexi-kernel",
    ),
    Refusal(
        "--position-embedding-type",
        lambda args: getattr(args, "position_embedding_type", None) in ("mrope", "relative"),
        "mrope and relative positions are not taken at the plan's positions yet",
        "use rope, yarn, learned_absolute or none",
    ),
    # Masks and packing
    Refusal(
        "--reset-attention-mask", _given("reset_attention_mask"), "document masks are not cut by a plan yet"
    ),
    Refusal("--sft", _given("sft"), "packed sequences are not cut by a plan yet"),
    Refusal(
        "--dataloader-inter-document-masking",
        _given("dataloader_inter_document_masking"),
        "document masks are not cut by a plan yet",
    ),
    # Layers that see the sequence
    Refusal("--num-experts", _given("num_experts"), "the router's losses assume equal token counts"),
    Refusal("--mtp-num-layers", _given("mtp_num_layers"), "its shift crosses shards of equal size only"),
    Refusal(
        "--hybrid-layer-pattern",
        lambda args: any(
            getattr(args, name, None)
            for name in ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model")
        ),
        "its layers are not cut by a plan yet",
    ),
    Refusal(
        "--heterogeneous-layers-config-path",
        lambda args: bool(
            getattr(args, "heterogeneous_layers_config_path", None)
            or getattr(args, "heterogeneous_layers_config_encoded_json", None)
        ),
        "a plan has one number of heads for all layers",
    ),
    # Other ways to cut the sequence
    Refusal(
        "--cp-comm-type",
        _differs("cp_comm_type", ["p2p"]),
        "the plan says how ranks exchange",
        "leave it out",
    ),
    Refusal(
        "--hybrid-context-parallel",
        _given("hybrid_context_parallel"),
        "the plan says which ranks share a sequence",
    ),
    Refusal(
        "--hierarchical-context-parallel-sizes",
        _given("hierarchical_context_parallel_sizes"),
        "the plan says how ranks exchange",
        "leave it out",
    ),
    Refusal("--decoder-seq-length", _given("decoder_seq_length"), "a plan has one sequence length"),
    # Shapes that are fixed beforehand, or assumed equal on all ranks
    Refusal("--tp-comm-overlap", _given("tp_comm_overlap"), "its buffers have the size of an equal shard"),
    Refusal("--fp8-format", _given("fp8"), "its rows are not padded to what fp8 needs yet"),
    Refusal("--fp4-format", _given("fp4"), "its rows are not padded to what fp4 needs yet"),
    Refusal(
        "--cuda-graph-impl",
        _differs("cuda_graph_impl", "none"),
        "the exchange between groups is not captured yet",
    ),
    Refusal(
        "--enable-cuda-graph", _given("enable_cuda_graph"), "the exchange between groups is not captured yet"
    ),
    Refusal(
        "--external-cuda-graph",
        _given("external_cuda_graph"),
        "the exchange between groups is not captured yet",
    ),
    Refusal(
        "--ddp-average-in-collective",
        _given("ddp_average_in_collective"),
        "it averages over ranks, a plan over tokens",
    ),
    # Not shown to work yet
    Refusal("--use-torch-fsdp2", _given("use_torch_fsdp2"), "it was not shown to be exact under a plan yet"),
    Refusal(
        "--use-megatron-fsdp", _given("use_megatron_fsdp"), "it was not shown to be exact under a plan yet"
    ),
    Refusal(
        "--fine-grained-activation-offloading",
        _given("fine_grained_activation_offloading"),
        "it was not shown to be exact under a plan yet",
    ),
    Refusal(
        "--cpu-offloading-num-layers",
        _given("cpu_offloading_num_layers"),
        "it was not shown to be exact under a plan yet",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        lambda args: (
            (getattr(args, "tensor_parallel_num_weight_shards", None) or 0) > args.tensor_model_parallel_size
        ),
        "it was not shown to be exact under a plan yet",
    ),
    Refusal("--logits-load-dir", _given("logits_load_dir"), "the stored logits are not cut by a plan"),
    Refusal(
        "--batch-invariant-mode",
        _given("batch_invariant_mode"),
        "Megatron supports it without context parallelism only",
    ),
    Refusal("--perform-rl-step", _given("perform_rl_step"), "generation is not cut by a plan"),
)


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


def refuse_unsupported(args: Namespace) -> None:
    """Refuse the first option of the job that a plan does not carry out.

    Raises:
        PlanError: with the option, the reason and the remedy.
    """
    for refusal in REFUSALS:
        if refusal.used(args):
            raise PlanError(
                f"{refusal.option} does not work with --hexi-plan: {refusal.reason}; {refusal.remedy}"
            )
