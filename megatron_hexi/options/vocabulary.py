"""The padded vocabulary of a job: equal under all of its plans, as losses and checkpoints need."""

from __future__ import annotations

import math
from argparse import Namespace

from megatron_hexi.options.job_terms import tensor_parallel_flag
from megatron_hexi.plan import Plan


def vocabulary_step(plan: Plan, divisor: int) -> int:
    """Return the number of rows of which the padded vocabulary under a plan is a multiple.

    Args:
        divisor: ``--make-vocab-size-divisible-by``, of a tensor-parallel rank as Megatron counts.
    """
    if plan.workload.padded_vocabulary is not None:
        return plan.workload.padded_vocabulary
    return math.lcm(divisor * tensor_parallel_flag(plan), *(len(member.ranks) for member in plan.members))


def keep_vocabulary(args: Namespace, first: Plan, plan: Plan) -> None:
    """Set the job's arguments so that the vocabulary under a plan has as many rows as under the first.

    Args:
        args: Megatron's arguments, not yet checked; changed in place.
        plan: a plan whose tensor-parallel sizes divide the rows.
    """
    step = vocabulary_step(first, args.make_vocab_size_divisible_by)
    args.make_vocab_size_divisible_by = step // tensor_parallel_flag(plan)
