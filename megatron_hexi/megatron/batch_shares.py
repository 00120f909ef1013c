"""Checks of ``--hexi-batch-shares`` against the job, before anything is allocated."""

from __future__ import annotations

from argparse import Namespace

from megatron_hexi.elastic.store import in_round
from megatron_hexi.errors import HexiError
from megatron_hexi.kinds.states import layers_with_state, state_option
from megatron_hexi.options.kinds import is_packed
from megatron_hexi.plan import Plan

_FLAG = "--hexi-batch-shares"


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
    if args.hexi_replan_interval is not None:
        raise HexiError(
            f"{_FLAG}: does not work with --hexi-replan-interval, which reads ranks' speeds from times of "
            "equal work; leave one of them out"
        )
    letters = layers_with_state(args)
    if letters:
        raise HexiError(
            f"{_FLAG}: does not work with {state_option(args)} of layers {letters}: they have the plan's "
            "heads in every batch; leave one of them out"
        )
