"""Check the experts of a job against a plan whose stages state their layers."""

from __future__ import annotations

from argparse import Namespace

from megatron_hexi.errors import PlanError
from megatron_hexi.plan import Plan
from megatron_hexi.plan.experts import held_experts


def check_experts(args: Namespace, plan: Plan) -> None:
    """Check the experts of a job against a plan whose stages state their layers.

    Raises:
        PlanError: job and plan contradict each other; the message has both values.
    """
    if not args.num_experts:
        return
    path = args.hexi_plan
    _check_losses(args, plan)
    shared, size = args.moe_shared_expert_intermediate_size, args.moe_ffn_hidden_size or args.ffn_hidden_size
    for member in plan.members:
        ranks, width = list(member.ranks), len(member.ranks)
        if width > 1 and not args.sequence_parallel:
            raise PlanError(
                f"{path}: ranks {ranks} are a unit, and with tensor parallelism Megatron trains experts "
                "under sequence parallelism only; add --sequence-parallel"
            )
        if shared and shared % width:
            raise PlanError(
                f"{path}: ranks {ranks} cut each shared expert in {width}, which does not divide "
                f"--moe-shared-expert-intermediate-size {shared}; give the unit another number of ranks"
            )
        parts = held_experts(member, args.num_experts)[0].parts
        if size is not None and size % parts:
            raise PlanError(
                f"{path}: ranks {ranks} cut each expert in {parts}, which does not divide "
                f"--moe-ffn-hidden-size {size}; give each rank a range of experts: [[0, 2], [2, 4]]"
            )
        if parts > 1 and args.add_bias_linear:
            raise PlanError(
                f"{path}: ranks {ranks} cut each expert in {parts}, and each would add its biases; give "
                "--disable-bias-linear, or each rank a range of experts: [[0, 2], [2, 4]]"
            )


def has_running_mean(args: Namespace) -> bool:
    """Return whether experts are balanced by a running mean over the micro-batches so far."""
    kinds = args.moe_router_load_balancing_type
    return "global_aux_loss" in (kinds if isinstance(kinds, list) else [kinds])


def _check_losses(args: Namespace, plan: Plan) -> None:
    """Refuse a running mean over micro-batches if ranks run micro-batches in another order than one rank."""
    if not has_running_mean(args):
        return
    if len(plan.replicas) > 1:
        why = "counts the micro-batches so far, which other replicas run at other times"
    elif plan.has_ministages:
        why = "counts the micro-batches so far, which ministages run in another order"
    else:
        return
    raise PlanError(
        f"{args.hexi_plan}: --moe-router-load-balancing-type global_aux_loss {why}; use aux_loss or "
        "seq_aux_loss"
    )
