"""Heads of a layer with a state (Mamba-2, gated delta net) on each member of a group.

A state passes along the sequence, so a member scans some heads over all of the group's tokens, as it
attends. Consecutive heads share keys and queries: a group of B and C in Mamba, a key head in a delta net. A
member whose range starts or ends inside such a group holds its keys and queries too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from megatron_hexi.plan.layout import apportion, consecutive
from megatron_hexi.plan.model import Plan, Range


@functools.cache  # asked for by every layer
def state_heads(attention: tuple[Range, ...], heads: int) -> tuple[Range, ...]:
    """Return the heads of each member: as many of all as it has of attention's, by largest remainder.

    A member without heads of attention has none; one with few of them may have none either.

    Args:
        heads: heads of the layer, over all members.
    """
    return tuple(consecutive(apportion(heads, [stop - start for start, stop in attention])))


def divided_domain(plan: Plan, has_state: Sequence[bool]) -> tuple[str, int] | None:
    """Return the first place of a layer with a state in a domain of several groups, and their number.

    ``None``: there is no such place. A plan with one cannot be trained: a state does not pass between groups,
    so one group must have the whole sequence.

    Args:
        has_state: for each layer of the model, whether it passes a state along the sequence.
    """
    for number, replica in enumerate(plan.replicas):
        for place, stage in enumerate(replica.stages):
            layers = [(0, len(has_state))] if stage.layers is None else replica.ministage_layers(place)
            groups = max(len(domain.groups) for domain in stage.domains)
            if groups > 1 and any(any(has_state[start:stop]) for start, stop in layers):
                where = "" if stage.layers is None else f".stages[{place}]"
                return f"replicas[{number}]{where}", groups
    return None


def even_groups(heads: Range, shared_by: int) -> tuple[int, ...]:
    """Return groups, counted from the first that these heads read, each of which serves as many of them.

    Kernels take heads in groups of one size. Where the range cuts a group, groups are repeated.
    """
    start, stop = heads
    size = math.gcd(start, stop, shared_by)
    return tuple(head // shared_by - start // shared_by for head in range(start, stop, size))
