"""Arithmetic of query heads and the KV heads that they read.

Query head h reads KV head h // ratio, where ratio = query heads / KV heads. A member whose head range
starts or ends inside a KV head's group of queries holds that KV head too, beside its neighbour.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_hexi.plan.model import Range


def kv_range(heads: Range, ratio: int) -> Range:
    """Return the KV heads that a range of query heads reads; empty for no heads."""
    start, stop = heads
    return (start // ratio, (stop - 1) // ratio + 1) if start < stop else (start // ratio, start // ratio)


def kv_pieces(heads: Range, ratio: int) -> Iterator[Range]:
    """Cut a range of query heads into pieces that each read one KV head, and yield the pieces."""
    start, stop = heads
    for kv in range(*kv_range(heads, ratio)):
        yield max(start, kv * ratio), min(stop, (kv + 1) * ratio)


@dataclass(frozen=True)
class HeadSpan:
    """A range of query heads and the KV heads that they read, with equally many query heads per KV head.

    Kernels compute grouped-query attention in this form only. Both ranges count from the member's first head.
    """

    queries: Range
    kv: Range


def head_spans(heads: Range, ratio: int, origin: int | None = None) -> tuple[HeadSpan, ...]:
    """Cut a range of query heads into the fewest spans: at most three (a part, whole groups, a part).

    Args:
        origin: the member's first query head, where `heads` are only some of the member's heads.
    """
    origin = heads[0] if origin is None else origin
    first_kv = origin // ratio
    spans: list[HeadSpan] = []
    for low, high in kv_pieces(heads, ratio):
        kv = low // ratio - first_kv
        here = HeadSpan((low - origin, high - origin), (kv, kv + 1))
        if spans and _queries_per_kv(spans[-1]) == high - low:
            previous = spans.pop()
            here = HeadSpan((previous.queries[0], here.queries[1]), (previous.kv[0], here.kv[1]))
        spans.append(here)
    return tuple(spans)


@lru_cache(maxsize=4096)  # a search asks for few ranges, over and over
def heads_first(heads: Range, ratio: int) -> int:
    """Return the number of query heads in the first half when a member's query heads are cut in two.

    The cut lies between two KV heads, as near to the middle as possible (of two equally near cuts, the
    earlier), so that no KV head is read twice. Query heads that read a single KV head are halved, with the
    odd head in the first half.
    """
    start, stop = heads
    cuts = range((start // ratio + 1) * ratio, stop, ratio)
    return min(cuts, key=lambda cut: abs(2 * cut - start - stop), default=(start + stop + 1) // 2) - start


def spans_in_two(heads: Range, ratio: int) -> tuple[tuple[HeadSpan, ...], tuple[HeadSpan, ...]]:
    """Split a member's heads where `heads_first` says, and return the spans of each half.

    Heads count from the member's first head.
    """
    start, stop = heads
    middle = start + heads_first(heads, ratio)
    return head_spans((start, middle), ratio), head_spans((middle, stop), ratio, origin=start)


@lru_cache(maxsize=4096)
def head_parts(heads: Range, ratio: int, most: int) -> tuple[Range, ...]:
    """Cut a range of query heads between KV heads, as evenly as possible, into at most `most` parts.

    Earlier parts are the smaller ones. An empty range gives one empty part.
    """
    first, last = kv_range(heads, ratio)
    count = max(1, min(most, last - first))
    cuts = [(first + (last - first) * part // count) * ratio for part in range(1, count)]
    return tuple(itertools.pairwise([heads[0], *cuts, heads[1]]))


def overlap(a: Range, b: Range) -> int:
    """Return the number of elements that two ranges share."""
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _queries_per_kv(span: HeadSpan) -> int:
    return (span.queries[1] - span.queries[0]) // (span.kv[1] - span.kv[0])
