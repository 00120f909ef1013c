"""Options beside a plan: mixture of experts."""

from __future__ import annotations

from argparse import Namespace

from megatron_hexi.options.kinds import DRAWS, UNSHOWN, Refused, Supported, given, one_of, shown

OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
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
        shown("--moe-token-dispatcher-type allgather with experts on one rank", "experts-gathered-groups"),
        Refused(
            "--moe-token-dispatcher-type",
            lambda args: bool(args.num_experts) and _gathers_or_is_flexible(args),
            "it takes equal shards, or is not tested under a plan yet",
            "give --moe-token-dispatcher-type alltoall",
            "flex; allgather with --expert-model-parallel-size above 1",
        ),
        given("--moe-expert-capacity-factor", "which tokens an expert drops would depend on the plan"),
        given("--moe-expert-rank-capacity-factor", "which tokens an expert drops would depend on the plan"),
        given("--moe-input-jitter-eps", DRAWS),
        given("--moe-router-force-load-balancing", DRAWS),
        given("--moe-router-force-biased", DRAWS),
        given("--moe-enable-routing-replay", "recorded routes are not sharded by a plan"),
        given("--moe-paged-stash", UNSHOWN),
        given("--moe-shared-expert-overlap", UNSHOWN),
        given("--overlap-moe-expert-parallel-comm", UNSHOWN),
    ),
}


def _gathers_or_is_flexible(args: Namespace) -> bool:
    kind = args.moe_token_dispatcher_type
    return kind == "flex" or (kind == "allgather" and args.expert_model_parallel_size > 1)


def _balances_sequences(args: Namespace) -> bool:
    kind = args.moe_router_load_balancing_type
    return bool(args.num_experts) and "seq_aux_loss" in (kind if isinstance(kind, list) else [kind])
