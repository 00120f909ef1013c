"""The least time of groups of many shapes at once, units at their best rates: part of the bound (packing.py).

A group takes X + A + Y (group_times.py). Here tokens run at the best rates of all units together, heads are
whole, and all-to-alls move what they must: a site's units can take so many heads at most in Y, and those of
the others leave it so many at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.groups.site_times import Shape

#: What rounding may take away of whole heads.
_ROUNDING = 1e-9
#: Shapes that are looked at at once: their arrays stay small.
_CHUNK = 256


class SiteRates(Protocol):
    """Of a class of sites: what each unit does at most, tokens a second and tokens x heads a second."""

    token_rate: float
    head_rate: float

    def moving(self, units: int, outside: bool) -> tuple[float, float]:
        """Seconds a token that so many units send to or receive from other sites, and latency."""


def seconds_a_token(shapes: Sequence[Shape], sites: Sequence[SiteRates], heads: int) -> Floats:
    """Seconds of a layer for each token of a group, at least, [shapes].

    Args:
        shapes: of groups.
        sites: of each class.
        heads: H, that a group has.
    """
    chunks = [shapes[first : first + _CHUNK] for first in range(0, len(shapes), _CHUNK)]
    return np.concatenate([_of_chunk(chunk, sites, heads) for chunk in chunks])


def _of_chunk(shapes: Sequence[Shape], sites: Sequence[SiteRates], heads: int) -> Floats:
    # [shapes, sites of a group]; shapes of fewer sites are filled with sites of no units.
    size = len(shapes), max(map(len, shapes))
    units, token_rate, head_rate, each = (np.zeros(size) for _ in range(4))
    for number, shape in enumerate(shapes):
        for place, (of_class, count) in enumerate(shape):
            site = sites[of_class]
            units[number, place] = count
            token_rate[number, place], head_rate[number, place] = site.token_rate, site.head_rate
            if len(shape) > 1:
                each[number, place] = site.moving(count, outside=True)[0]
    # Y a token: what a unit of some kind takes for so many heads. Between two of these nobody takes one more.
    rates = np.array([site.head_rate for site in sites])
    busy = np.unique(np.arange(1, heads + 1)[:, None] / rates)[:, None, None]
    most = np.minimum(units * np.floor(busy * head_rate + _ROUNDING), heads)
    others = most.sum(axis=2, keepdims=True) - most
    few, many = np.maximum(0.0, heads - others) / heads, most / heads
    moved = np.minimum(few * (1 - few), many * (1 - many))
    seconds = busy[:, :, 0] + (each * moved).max(axis=2)
    enough = most.sum(axis=2) >= heads
    least: Floats = 1 / (units * token_rate).sum(axis=1) + np.where(enough, seconds, np.inf).min(axis=0)
    return least
