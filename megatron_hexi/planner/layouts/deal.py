"""Exact assignment of whole tokens, heads and micro-batches."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.plan.layout import apportion


def assign_in_turn(
    count: int, times: Sequence[Callable[[int], float]], *, least: int = 0, caps: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Assign a count to members so that the last finishes as early as possible.

    One after another goes to the member that would be done with it first: exact, since a member's time only
    grows with what it has. Caps give way where they leave some over.

    Args:
        count: to deal; as many at least as all members must have.
        times: seconds that each member needs for so many.
        least: that each must have.
        caps: the most that each may have.
    """
    dealt = [least] * len(times)
    queue = [
        (time(least + 1), member) for member, time in enumerate(times) if caps is None or caps[member] > least
    ]
    heapq.heapify(queue)
    left = count - sum(dealt)
    while left and queue:
        _, member = heapq.heappop(queue)
        dealt[member] += 1
        left -= 1
        if caps is None or dealt[member] < caps[member]:
            heapq.heappush(queue, (times[member](dealt[member] + 1), member))
    if left:
        for member, more in enumerate(assign_in_turn(left, times)):
            dealt[member] += more
    return tuple(dealt)


def assign_heads(heads: int, seconds: Sequence[float], caps: Sequence[int] | None = None) -> tuple[int, ...]:
    """Assign heads so that the largest heads x seconds is least.

    Args:
        heads: to deal.
        seconds: that each member needs for one.
        caps: the most that each may have; they give way where they leave heads over.
    """
    return assign_in_turn(heads, [partial(operator.mul, each) for each in seconds], caps=caps)


def assign_tokens(tokens: int, weights: Floats, caps: Floats | None = None) -> tuple[int, ...]:
    """Assign tokens in proportion to weights; excess over caps goes to the others, in proportion.

    Caps give way, all by the same factor, where together they hold less than there is.

    Args:
        tokens: to deal.
        weights: at least one above 0.
        caps: the most that each may have.
    """
    if tokens == 0:
        return (0,) * len(weights)
    if caps is None:
        return tuple(apportion(tokens, list(weights)))
    if caps.sum() <= tokens:
        return tuple(apportion(tokens, list(caps if caps.sum() > 0 else weights)))
    shares = np.zeros(len(weights))
    free = weights > 0
    if caps[free].sum() < tokens:  # the rest has to go to members that would rather have none
        weights, free = np.where(free, weights, weights[free].min() * 1e-6), np.full(len(weights), True)
    while True:
        shares[free] = (tokens - shares[~free].sum()) * weights[free] / weights[free].sum()
        over = free & (shares > caps)
        if not over.any():
            return tuple(apportion(tokens, list(shares)))
        shares[over] = caps[over]
        free &= ~over
