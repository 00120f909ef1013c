"""Shares of the global batch: the micro-batches of each replica, and of each domain of a stage.

The cost model and the runtime both read them here, so that both use the same schedule. The micro-batches of a
global batch are assigned in the order of the replicas, consecutive ones to each. A replica runs its
micro-batches one after the other; when all replicas are done, all ranks sum their gradients, once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.model import Plan, Stage


@dataclass(frozen=True)
class Share:
    """Consecutive micro-batches of a global batch.

    Args:
        first: number of its first micro-batch, from 0.
        count: number of micro-batches.
        total: micro-batches of the global batch.
    """

    first: int
    count: int
    total: int

    def __contains__(self, micro_batch: int) -> bool:
        """Whether a micro-batch, numbered over all iterations, is in the share."""
        return 0 <= micro_batch % self.total - self.first < self.count


def has_equal_replicas(plan: Plan) -> bool:
    """Whether replicas are as Megatron's: equal numbers of ranks, in order, and equal shares of the batch."""
    ranks = [member.lead for replica in plan.replicas for member in replica.domain.members]
    sizes = {(len(replica.domain.members), replica.micro_batches) for replica in plan.replicas}
    return len(sizes) == 1 and ranks == sorted(ranks)


def assign_micro_batches(plan: Plan, global_batch_size: int, micro_batch_size: int) -> tuple[Share, ...]:
    """Return the share of each replica: the stated one, or else an equal one.

    Args:
        plan: the plan.
        global_batch_size: sequences of an iteration.
        micro_batch_size: sequences of a micro-batch; the same for all replicas.

    Raises:
        PlanError: the shares do not add up to the batch; the message has all values.
    """
    total, replicas = global_batch_size // micro_batch_size, len(plan.replicas)
    stated = [replica.micro_batches for replica in plan.replicas]
    if None in stated and total % replicas:
        raise PlanError(
            f"{replicas} replicas cannot share {total} micro-batches of {micro_batch_size} equally; state "
            "each micro_batches, or give another global batch"
        )
    counts = [total // replicas if count is None else count for count in stated]
    assigned = sum(counts)
    if assigned != total or global_batch_size % micro_batch_size:
        raise PlanError(
            f"replicas take {assigned} micro-batches of {micro_batch_size}, {assigned * micro_batch_size} "
            f"sequences, the global batch has {global_batch_size}; make the two equal"
        )
    firsts = itertools.accumulate(counts, initial=0)
    return tuple(Share(first, count, total) for first, count in zip(firsts, counts, strict=False))


def assign_in_turn(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches that each domain of a stage takes, ascending.

    The order follows the plan and no clock, so that all ranks know it: a domain that takes n
    micro-batches of an iteration takes 1 / n of it for each. The next one goes to the domain that is free
    first; of several, to the one that takes most; of several, to the first.

    Args:
        counts: number of micro-batches of each domain.
    """
    assigned: list[list[int]] = [[] for _ in counts]
    for micro_batch in range(sum(counts)):
        free = [number for number, count in enumerate(counts) if len(assigned[number]) < count]
        first = min(free, key=lambda n: (Fraction(len(assigned[n]), counts[n]), -counts[n], n))
        assigned[first].append(micro_batch)
    return tuple(tuple(numbers) for numbers in assigned)


_assigned = lru_cache(maxsize=64)(assign_in_turn)


def domain_micro_batches(stage: Stage) -> tuple[tuple[int, ...] | None, ...]:
    """Return the micro-batches of each domain of a stage, ascending; ``None``: samples of all of them."""
    if not stage.takes_micro_batches:
        return (None,) * len(stage.domains)
    return _assigned(tuple(domain.micro_batches or 0 for domain in stage.domains))
