"""Rules for options of mixture of experts."""

from __future__ import annotations

from argparse import Namespace

from megatron_hexi.options.kinds import (
    DRAWS,
    Refused,
    Supported,
    beside_stages,
    given,
    items_of,
    one_of,
    shown,
)

_STAGES = "tests/megatron/test_stages_experts.py::"


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
        *(
            given(
                f"--moe-router-padding-for-{what}", "rows of each expert are padded where they are multiplied"
            )
            for what in ("fp8", "quantization")
        ),
        given("--moe-expert-capacity-factor", "which tokens an expert drops would depend on the plan"),
        given("--moe-expert-rank-capacity-factor", "which tokens an expert drops would depend on the plan"),
        given("--moe-input-jitter-eps", DRAWS),
        given("--moe-router-force-load-balancing", DRAWS),
        given("--moe-router-force-biased", DRAWS),
        given("--moe-enable-routing-replay", "recorded routes are not sharded by a plan"),
    ),
    "Experts in stages that differ": (
        Supported(
            "--num-experts, --moe-router-load-balancing-type aux_loss|seq_aux_loss, --moe-z-loss-coeff, "
            "--moe-router-enable-expert-bias, --moe-shared-expert-intermediate-size, --moe-layer-freq",
            _STAGES + "test_experts_train_as_on_one_rank[slices-all-moe]",
            "any experts on any ranks of a stage",
        ),
        Supported(
            "--moe-router-load-balancing-type global_aux_loss",
            _STAGES + "test_experts_train_as_on_one_rank[uneven-global-long]",
            "supported only with one replica in 1F1B",
        ),
        Supported(
            "--moe-grouped-gemm",
            "tests/megatron/test_te_training.py::test_stages_train_experts_as_one_rank[slices-grouped]",
        ),
        Supported(
            "--ckpt-format torch_dist",
            _STAGES + "test_any_layout_goes_on_from_any_other[samples-to-slices-fp32]",
            "from and to any layout; of what Megatron saves with expert parallelism, the weights",
        ),
        beside_stages(
            "--num-experts",
            lambda args: bool(args.num_experts),
            "expert layers are others before 0.19",
            "install megatron-core 0.19, or train without it",
            versions="<0.19",
        ),
    ),
}


def _balances_sequences(args: Namespace) -> bool:
    return bool(args.num_experts) and "seq_aux_loss" in items_of(args.moe_router_load_balancing_type)
