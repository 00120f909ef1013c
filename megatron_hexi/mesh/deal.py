"""Whole micro-batches dealt to the domains of a stage, as each becomes free.

The deal follows what is predicted and no clock, so that all ranks know it: a domain that takes n
micro-batches of an iteration takes 1 / n of it for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from megatron_hexi.plan.model import Stage


def deal(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Which micro-batches each domain takes, ascending.

    Each next one goes to the domain that is free first; of several, to the one that takes most; of several,
    to the first.

    Args:
        counts: how many each takes.
    """
    dealt: list[list[int]] = [[] for _ in counts]
    for micro_batch in range(sum(counts)):
        free = [number for number, count in enumerate(counts) if len(dealt[number]) < count]
        first = min(free, key=lambda n: (Fraction(len(dealt[n]), counts[n]), -counts[n], n))
        dealt[first].append(micro_batch)
    return tuple(tuple(one) for one in dealt)


def stage_deal(stage: Stage) -> tuple[tuple[int, ...] | None, ...]:
    """Which micro-batches each domain of a stage takes, ascending; ``None``: some samples of all."""
    if not stage.is_dealt:
        return (None,) * len(stage.domains)
    return _dealt(tuple(domain.micro_batches or 0 for domain in stage.domains))


_dealt = lru_cache(maxsize=64)(deal)
