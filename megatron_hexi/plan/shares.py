"""Shares of the global batch: the micro-batches of each replica, and of each domain of a stage.

The cost model and the runtime both use this module, so that both follow the same schedule. Consecutive
micro-batches of a global batch are assigned to the replicas in order. A replica processes its micro-batches
one after the other; when all replicas have finished, all ranks sum their gradients, once.
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
    """A share of the global batch: consecutive micro-batches, of one replica.

    Args:
        first: number of the first micro-batch of the share, from 0.
    """

    first: int
    count: int
    total: int

    def __contains__(self, micro_batch: int) -> bool:
        """Whether a micro-batch, numbered over all iterations, is in the share."""
        return 0 <= micro_batch % self.total - self.first < self.count


def has_equal_replicas(plan: Plan) -> bool:
    """Whether replicas are like Megatron's: equally many ranks each, in rank order, and equal shares."""
    ranks = [member.lead for replica in plan.replicas for member in replica.domain.members]
    sizes = {(len(replica.domain.members), replica.micro_batches) for replica in plan.replicas}
    return len(sizes) == 1 and ranks == sorted(ranks)


def assign_micro_batches(plan: Plan, global_batch_size: int, micro_batch_size: int) -> tuple[Share, ...]:
    """Return each replica's share of the global batch: the share stated in the plan, or else an equal share.

    Args:
        micro_batch_size: number of sequences in a micro-batch; the same for all replicas.

    Raises:
        PlanError: the shares do not add up to the global batch; the message has all values.
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
    """Return the micro-batches of each domain of a stage that divides them by number, ascending.

    The assignment follows from the plan and from no clock, so every rank knows it. A domain that processes n
    micro-batches is taken to need 1 / n of an iteration for each. The next micro-batch goes to the domain
    that is free first; among several, to the domain with most micro-batches; then to the first.
    """
    assigned: list[list[int]] = [[] for _ in counts]
    for micro_batch in range(sum(counts)):
        free = [number for number, count in enumerate(counts) if len(assigned[number]) < count]
        first = min(free, key=lambda n: (Fraction(len(assigned[n]), counts[n]), -counts[n], n))
        assigned[first].append(micro_batch)
    return tuple(tuple(numbers) for numbers in assigned)


_assigned = lru_cache(maxsize=64)(assign_in_turn)


def domain_micro_batches(stage: Stage) -> tuple[tuple[int, ...] | None, ...]:
    """Return the micro-batch numbers of each domain, ascending; ``None``: samples of every micro-batch."""
    if not stage.takes_micro_batches:
        return (None,) * len(stage.domains)
    return _assigned(tuple(domain.micro_batches or 0 for domain in stage.domains))
