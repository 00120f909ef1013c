"""Numbers of pairs, queries and keys of attention with a window, for all groups of all replicas at once.

A query at position q sees the keys at positions k with q - w < k <= q. Shape letters: C steps, N groups,
J segments.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.documents import PackedClass
from megatron_hexi.cost.plan_arrays import PlanArrays


def own_pairs(plan: PlanArrays, window: int) -> Floats:
    """Return the number of visible pairs of a query and a key of the same group, [N].

    Args:
        window: keys that a query sees, its own among them (w).
    """
    pairs = np.zeros(len(plan.starts))
    for key in range(plan.starts.shape[1]):
        keys = plan.starts[:, key, None], plan.stops[:, key, None]
        pairs += _pairs(plan.starts, plan.stops, *keys, window).sum(axis=1)
    return pairs


def document_window(window: int, part: float) -> int:
    """Return the window in a whole sequence that corresponds to one in a document of a part of its length."""
    return round(window / part)


def far_window(
    plan: PlanArrays, source: Ints, active: Bools, window: int, documents: Iterable[PackedClass]
) -> tuple[Ints, Floats, Ints]:
    """Return the queries that see keys of another group, the keys that they see, and the keys received.

    Args:
        source: the group whose keys each group uses, [C, N].
        active: whether the group's replica has the step, [C, N].
        window: keys that a query sees, its own among them (w).
        documents: documents of each class in the N groups.

    Returns:
        queries: number of queries of each segment that see any key of the source, [C, N, J].
        keys: mean number of keys of the source that each of these queries sees, [C, N, J].
        received: number of keys that the group receives: of each segment of the source those from the first
            that a query sees to the last, [C, N].
    """
    shape = *source.shape, plan.starts.shape[1]
    pairs, queries, received = np.zeros(shape), np.zeros(shape), np.zeros(source.shape)
    for share, part, is_cut in documents:
        seen, near, kept = _far_window(plan, source, active, document_window(window, part))
        pairs += share * part * np.reshape(is_cut, (-1, 1)) * seen
        queries += share * near
        received += share * kept
    count = np.rint(queries).astype(np.int64)
    return count, pairs / np.maximum(count, 1), np.rint(received).astype(np.int64)


def _far_window(plan: PlanArrays, source: Ints, active: Bools, window: int) -> tuple[Floats, Ints, Ints]:
    """Return pairs and queries [C, N, J], and keys received [C, N], in a sequence of one document."""
    shape = *source.shape, plan.starts.shape[1]
    pairs, queries = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    received = np.zeros(source.shape, dtype=np.int64)
    size = plan.stops - plan.starts
    for place in range(shape[2]):
        start, stop = plan.starts[source, place][..., None], plan.stops[source, place][..., None]
        there = active[..., None] & (stop > start)
        pairs += np.where(there, _pairs(plan.starts, plan.stops, start, stop, window), 0.0)
        # Segments do not overlap: the first query of a segment sees the w - 1 latest keys before it.
        is_before = there & (stop <= plan.starts) & (size > 0)
        near = np.clip(stop - 1 + window - plan.starts, 0, size)
        queries += np.where(is_before, near, 0)
        kept = np.where(is_before, np.clip(stop - np.maximum(start, plan.starts - window + 1), 0, None), 0)
        received += kept.max(axis=2)
    return pairs, np.minimum(queries, size), received


def _pairs(first: Ints, last: Ints, start: Ints, stop: Ints, window: int) -> Floats:
    """Return the number of visible pairs of queries in [first, last) and keys in [start, stop)."""
    visible: Floats = _up_to(first, last, start, stop, 0) - _up_to(first, last, start, stop, window)
    return visible


def _up_to(first: Ints, last: Ints, start: Ints, stop: Ints, behind: int) -> Floats:
    """Return the number of pairs whose key is at least `behind` positions before the query."""
    size = np.maximum(stop - start, 0).astype(float)
    return _stairs(last - behind - start, size) - _stairs(first - behind - start, size)


def _stairs(steps: Ints, size: Floats) -> Floats:
    """Return the sum of min(x, size) over x = 1 to `steps`."""
    rising = np.clip(steps, 0, size)
    level: Floats = rising * (rising + 1) / 2 + (np.maximum(steps, 0) - rising) * size
    return level
