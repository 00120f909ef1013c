"""Shares: which micro-batches of a global batch each replica takes.

The cost model and the runtime both read them here, so that they mean one schedule: the micro-batches of a
global batch are dealt in the order of the replicas, consecutive ones to each. A replica runs its own one
after the other, beside the other replicas; when all are done, all ranks add up their gradients, once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.model import Plan


@dataclass(frozen=True)
class Share:
    """Consecutive micro-batches of a global batch.

    Args:
        first: number of the first of them, from 0.
        count: how many.
        total: how many the global batch has.
    """

    first: int
    count: int
    total: int

    def __contains__(self, micro_batch: int) -> bool:
        """Whether a micro-batch, counted on from the first of any global batch, is one of them."""
        return 0 <= micro_batch % self.total - self.first < self.count


def has_equal_replicas(plan: Plan) -> bool:
    """Whether the replicas are Megatron's: as many ranks each, dealt in order, and equal shares."""
    ranks = [member.lead for replica in plan.replicas for member in replica.domain.members]
    sizes = {(len(replica.domain.members), replica.micro_batches) for replica in plan.replicas}
    return len(sizes) == 1 and ranks == sorted(ranks)


def deal_micro_batches(plan: Plan, global_batch_size: int, micro_batch_size: int) -> tuple[Share, ...]:
    """The share of each replica: what it states, or else an equal one.

    Args:
        plan: the plan.
        global_batch_size: sequences of an iteration.
        micro_batch_size: sequences that pass at once; the same for all replicas.

    Raises:
        PlanError: the shares do not add up to the batch; with all values.
    """
    total, replicas = global_batch_size // micro_batch_size, len(plan.replicas)
    stated = [replica.micro_batches for replica in plan.replicas]
    if None in stated and total % replicas:
        raise PlanError(
            f"{replicas} replicas cannot share {total} micro-batches of {micro_batch_size} equally; state "
            "each micro_batches, or give another global batch"
        )
    counts = [total // replicas if count is None else count for count in stated]
    taken = sum(counts)
    if taken != total or global_batch_size % micro_batch_size:
        raise PlanError(
            f"replicas take {taken} micro-batches of {micro_batch_size}, {taken * micro_batch_size} "
            f"sequences, the global batch has {global_batch_size}; make the two equal"
        )
    firsts = itertools.accumulate(counts, initial=0)
    return tuple(Share(first, count, total) for first, count in zip(firsts, counts, strict=False))
