"""Arithmetic of query heads and the KV heads that they read.

Query head h reads KV head h // ratio, where ratio = query heads / KV heads. A member whose head range
starts or ends inside a KV head's group of queries holds that KV head too, beside its neighbour.

In a layer with a state (Mamba-2, gated delta net) the state passes along the sequence, so a member scans some
heads over all of the group's tokens, as it attends. Consecutive heads share keys and queries: a group of B
and C in Mamba, a key head in a delta net. A member whose range starts or ends inside such a group holds them
too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from megatron_hexi.plan.layout import apportion, consecutive
from megatron_hexi.plan.model import Plan, Range


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


@cache  # asked for by every layer
def state_heads(attention: tuple[Range, ...], heads: int) -> tuple[Range, ...]:
    """Return the heads of each member, in proportion to its heads of attention, by largest remainder.

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
    """Return the group that each run of equally many heads reads, counted from the first group of them.

    Kernels need equal runs. Where the range cuts a group, runs are shorter than groups, which then repeat.
    """
    start, stop = heads
    size = math.gcd(start, stop, shared_by)
    return tuple(head // shared_by - start // shared_by for head in range(start, stop, size))
