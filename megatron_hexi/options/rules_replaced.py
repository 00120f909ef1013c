"""Rules for options that only choose how fast, or in how much memory, the same function is trained."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from typing import Any

from megatron_hexi.options.kinds import PlanKind, Replaced, is_packed, masks_documents
from megatron_hexi.plan.flags import argument_name

_GRAPHS = "kernels are launched one by one; the exchange between groups is not captured"
_OVERLAP = "the plan's own order of computation and messages is used"
_OFFLOAD = "the plan's stages say what is offloaded (offload: [activations])"
_STATE = "the plan says which rank keeps which part of the optimizer's state, and where"


def _auto(value: Any) -> Any:
    """Return the member or word `auto` for a value of --attention-backend."""
    return type(value)["auto"] if isinstance(value, Enum) else "auto"


def _backend(args: Namespace) -> bool:
    return getattr(args.attention_backend, "name", args.attention_backend) not in ("auto", None)


def _travels_otherwise(args: Namespace) -> bool:
    """Whether tokens reach experts on several ranks by another exchange than the all-to-all."""
    kind = args.moe_token_dispatcher_type
    return bool(args.num_experts) and (
        kind == "flex" or (kind == "allgather" and args.expert_model_parallel_size > 1)
    )


def _unfused(option: str, used: Callable[[Namespace], Any]) -> Replaced:
    """Return a rule that an option, where used, replaces the fused kernel of rotary embeddings."""
    return Replaced(
        option,
        {"apply_rope_fusion": False},
        "rotary embeddings are computed without the fused kernel, which supports equal shards only",
        lambda args: bool(used(args)) and args.apply_rope_fusion,
        "without --no-rope-fusion",
    )


def _off(option: str, instead: str, beside: PlanKind = "any") -> Replaced:
    """Return a rule that replaces an option by switching it off."""
    return Replaced(option, {argument_name(option): False}, instead, beside=beside)


def keeps_fp32_state(args: Namespace) -> bool:
    """Whether the precision-aware optimizer of a job keeps gradients, weights and moments in fp32."""
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return all(str(getattr(args, name, "fp32")) in ("fp32", "torch.float32") for name in names)


def _is_precision_aware(args: Namespace) -> bool:
    aware = getattr(args, "use_precision_aware_optimizer", False)
    return aware and not getattr(args, "optimizer_cpu_offload", False) and keeps_fp32_state(args)


OPTIONS: dict[str, tuple[Replaced, ...]] = {
    "What a plan replaces": (
        Replaced(
            "--attention-backend",
            {"attention_backend": _auto},
            "the plan's kernels compute attention; --hexi-kernel chooses one",
            _backend,
            "any but auto",
        ),
        _unfused("--dataloader-inter-document-masking", masks_documents),
        _unfused("--sft", lambda args: args.sft),
        _unfused(
            "--multi-latent-attention", lambda args: args.multi_latent_attention and not is_packed(args)
        ),
        Replaced("--cp-comm-type", {"cp_comm_type": ["p2p"]}, "the plan says how ranks exchange"),
        Replaced(
            "--hierarchical-context-parallel-sizes",
            {"hierarchical_context_parallel_sizes": None},
            "the plan says how ranks exchange",
        ),
        Replaced(
            "--moe-token-dispatcher-type",
            {
                "moe_token_dispatcher_type": "alltoall",
                "moe_enable_deepep": False,
                "moe_flex_dispatcher_backend": "deepep",  # the default
            },
            "tokens travel to experts by an all-to-all",
            _travels_otherwise,
            "flex; allgather with --expert-model-parallel-size above 1",
        ),
        Replaced(
            "--moe-token-dispatcher-type",
            {"moe_token_dispatcher_type": "alltoall"},
            "tokens travel to uneven experts by an all-to-all",
            lambda args: bool(args.num_experts) and args.moe_token_dispatcher_type == "allgather",
            "allgather",
            beside="stages",
        ),
        _off("--moe-shared-expert-overlap", "shared experts are computed before the others"),
        Replaced(
            "--overlap-moe-expert-parallel-comm",
            {
                "overlap_moe_expert_parallel_comm": False,
                "delay_wgrad_compute": False,
                "ep_overlap_early_attn_memory_release": False,
            },
            _OVERLAP,
        ),
        _off("--moe-paged-stash", "activations stay where the plan says"),
        _off("--delay-wgrad-compute", _OVERLAP),
        _off("--tp-comm-overlap", _OVERLAP),
        _off("--ddp-average-in-collective", "gradients are summed, and divided by the number of tokens"),
        Replaced(
            "--num-distributed-optimizer-instances",
            {"num_distributed_optimizer_instances": 1},
            "all replicas share the optimizer's state",
        ),
        _off("--use-tp-pp-dp-mapping", "the plan says in which order ranks lie"),
        Replaced(
            "--cuda-graph-impl",
            {"cuda_graph_impl": "none", "cuda_graph_modules": [], "cuda_graph_scope": []},  # 0.17: scope
            _GRAPHS,
        ),
        _off("--enable-cuda-graph", _GRAPHS),
        _off("--external-cuda-graph", _GRAPHS),
        _off("--fine-grained-activation-offloading", _OFFLOAD),
        Replaced("--cpu-offloading-num-layers", {"cpu_offloading_num_layers": 0}, _OFFLOAD),
        Replaced(
            "--recompute-modules",
            {"recompute_modules": lambda value: [name for name in value if name != "gdn_norm_out"] or None},
            "the norm of delta nets is kept",
            lambda args: "gdn_norm_out" in (args.recompute_modules or ()),
            "gdn_norm_out",
        ),
    ),
    "What stages that differ replace": (
        Replaced(
            "--optimizer-cpu-offload",
            {"optimizer_cpu_offload": False, "use_precision_aware_optimizer": False},
            f"{_STATE} (offload: [optimizer])",
            lambda args: getattr(args, "optimizer_cpu_offload", False) and keeps_fp32_state(args),
            "with states in fp32",
            beside="stages",
        ),
        Replaced(
            "--use-precision-aware-optimizer",
            {"use_precision_aware_optimizer": False},
            _STATE,
            _is_precision_aware,
            "with states in fp32",
            beside="stages",
        ),
        Replaced(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            {"microbatch_group_size_per_vp_stage": None},
            "with order: interleaved a group has as many micro-batches as its replica stages",
            beside="stages",
        ),
        _off("--overlap-param-gather-with-optimizer-step", _OVERLAP, beside="stages"),
        _off("--defer-embedding-wgrad-compute", _OVERLAP, beside="stages"),
    ),
}
