"""Checks of ``--hexi-batch-shares`` against the job, before anything is allocated."""

from __future__ import annotations

from argparse import Namespace

from megatron_hexi.elastic.store import in_round
from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.states import layers_with_state, state_option
from megatron_hexi.options.kinds import is_packed
from megatron_hexi.plan import Plan
from megatron_hexi.plan.check import refuse_stages

_FLAG = "--hexi-batch-shares"
#: Features that need the same rows in every batch, or times that depend on the plan alone; by argument.
_REFUSED = {
    "num_experts": ("--num-experts", "routers count the plan's rows"),
    "mtp_num_layers": ("--mtp-num-layers", "the shift over borders takes the plan's rows"),
    "hexi_replan_interval": ("--hexi-replan-interval", "it reads ranks' speeds from times of equal work"),
}


def check_batch_shares(args: Namespace, plan: Plan) -> None:
    """Refuse jobs that cannot have different rows in every batch.

    Raises:
        HexiError: the message has the flag and the remedy.
    """
    if not args.hexi_batch_shares:
        return
    if not is_packed(args):
        raise HexiError(
            f"{_FLAG}: shares out documents, and each sequence of the job is one document; add "
            f"--dataloader-inter-document-masking or --sft, or leave {_FLAG} out"
        )
    remedy = f"make a plan with --pipeline-model-parallel-size 1, or leave {_FLAG} out"
    if args.pipeline_model_parallel_size > 1:
        raise HexiError(
            f"{_FLAG}: does not work with pipeline stages, which send the same rows in every batch; {remedy}"
        )
    refuse_stages(plan, f"{_FLAG}: {args.hexi_plan}", "which send the same rows in every batch", remedy)
    if in_round():
        raise HexiError(
            f"{_FLAG}: is not supported in elastic jobs: a plan made after a node failure does not say "
            f"how fast its units are; start with torchrun, or leave {_FLAG} out"
        )
    if plan.rates is None:
        raise HexiError(
            f"{_FLAG}: {args.hexi_plan} does not say how fast its units are; make a plan with "
            f"hexi plan --batch-shares, or leave {_FLAG} out"
        )
    for name, (flag, reason) in _REFUSED.items():
        if getattr(args, name, None):
            raise HexiError(f"{_FLAG}: does not work with {flag}: {reason}; leave one of them out")
    letters = layers_with_state(args)
    if letters:
        raise HexiError(
            f"{_FLAG}: does not work with {state_option(args)} of layers {letters}: they have the plan's "
            "heads in every batch; leave one of them out"
        )
