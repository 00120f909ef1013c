"""Shares: which micro-batches of a global batch each replica takes, and each domain of a stage.

The cost model and the runtime both read them here, so that they mean one schedule: the micro-batches of a
global batch are dealt in the order of the replicas, consecutive ones to each. A replica runs its own one
after the other, beside the other replicas; when all are done, all ranks add up their gradients, once.
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


def deal(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The micro-batches that each domain of a stage takes, ascending.

    The deal follows what is predicted and no clock, so that all ranks know it: a domain that takes n
    micro-batches of an iteration takes 1 / n of it for each. The next one goes to the domain that is free
    first; of several, to the one that takes most; of several, to the first.

    Args:
        counts: how many each takes.
    """
    dealt: list[list[int]] = [[] for _ in counts]
    for micro_batch in range(sum(counts)):
        free = [number for number, count in enumerate(counts) if len(dealt[number]) < count]
        first = min(free, key=lambda n: (Fraction(len(dealt[n]), counts[n]), -counts[n], n))
        dealt[first].append(micro_batch)
    return tuple(tuple(taken) for taken in dealt)


_dealt = lru_cache(maxsize=64)(deal)


def stage_deal(stage: Stage) -> tuple[tuple[int, ...] | None, ...]:
    """The micro-batches that each domain of a stage takes, ascending; ``None``: some samples of all."""
    if not stage.is_dealt:
        return (None,) * len(stage.domains)
    return _dealt(tuple(domain.micro_batches or 0 for domain in stage.domains))
