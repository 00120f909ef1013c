"""Head arithmetic: KV heads follow the query heads, and are never torn.

Query head h reads KV head h // ratio, where ratio = query heads / KV heads. A member whose head range
starts or ends inside a KV head's group of queries holds that KV head too, beside its neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.plan.model import Range


def kv_range(heads: Range, ratio: int) -> Range:
    """The KV heads that the query heads need; empty for no heads."""
    start, stop = heads
    return (start // ratio, (stop - 1) // ratio + 1) if start < stop else (start // ratio, start // ratio)


@dataclass(frozen=True)
class HeadSpan:
    """Query heads and the KV heads that they read, with the same number of queries for each KV head.

    Kernels take grouped-query attention in this form only. Both ranges count from the member's first.
    """

    queries: Range
    kv: Range


def head_spans(heads: Range, ratio: int) -> tuple[HeadSpan, ...]:
    """The fewest spans that cover a head range: at most three (a part, whole groups, a part)."""
    start, stop = heads
    first_kv = start // ratio
    spans: list[HeadSpan] = []
    for kv in range(*kv_range(heads, ratio)):
        low, high = max(start, kv * ratio), min(stop, (kv + 1) * ratio)
        here = HeadSpan((low - start, high - start), (kv - first_kv, kv - first_kv + 1))
        if spans and _queries_per_kv(spans[-1]) == high - low:
            previous = spans.pop()
            here = HeadSpan((previous.queries[0], here.queries[1]), (previous.kv[0], here.kv[1]))
        spans.append(here)
    return tuple(spans)


def overlap(a: Range, b: Range) -> int:
    """How many elements two ranges share."""
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _queries_per_kv(span: HeadSpan) -> int:
    return (span.queries[1] - span.queries[0]) // (span.kv[1] - span.kv[0])
