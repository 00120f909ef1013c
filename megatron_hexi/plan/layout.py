"""Layout: the positions of the sequence that each group and each shard holds.

Causal layouts are a weighted zigzag: each group gets a front interval and a back interval of half its
tokens each, nested (fronts in group order, backs in the reverse order). Its attention area is then
tokens_g x S / 2 whatever the other groups hold, and between two groups the mask is plain: the outer
one's front half is seen by all of the inner one's queries, and the inner one's keys are seen by the
outer one's back half.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_hexi.plan.model import Group, Range


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole parts of `total` in proportion to `weights`, by largest remainder (ties to the first).

    Source: Hamilton's method of apportionment. No part is further than one from its exact share.
    """
    scale = sum(weights)
    exact = [total * weight / scale for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def causal_segments(tokens: Sequence[int]) -> list[tuple[Range, ...]]:
    """Return nested front and back segments for groups of the given sizes, outermost group first."""
    fronts = consecutive([count // 2 for count in tokens])
    middle = sum(count // 2 for count in tokens)
    backs = consecutive([count - count // 2 for count in reversed(tokens)], start=middle)
    return [merge_segments([front, back]) for front, back in zip(fronts, reversed(backs), strict=True)]


def full_segments(tokens: Sequence[int]) -> list[tuple[Range, ...]]:
    """Return one segment for each group, in order: the layout without a causal mask."""
    return [merge_segments([segment]) for segment in consecutive(tokens)]


def consecutive(sizes: Iterable[int], start: int = 0) -> list[Range]:
    """Return adjacent ranges of the given sizes."""
    ranges = []
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    return ranges


def merge_segments(segments: Iterable[Range]) -> tuple[Range, ...]:
    """Return segments in ascending order, adjacent ones joined, without empty ones."""
    merged: list[Range] = []
    for start, stop in sorted(segments):
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def slice_segments(segments: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """Return tokens `start` to `stop` of the ascending tokens of `segments`, as segments."""
    pieces = []
    offset = 0
    for first, last in segments:
        low, high = max(start - offset, 0), min(stop - offset, last - first)
        if low < high:
            pieces.append((first + low, first + high))
        offset += last - first
    return merge_segments(pieces)


def shard_segments(group: Group, member: int) -> tuple[Range, ...]:
    """Return the positions of a member's shard."""
    start, stop = consecutive(m.tokens for m in group.members)[member]
    return slice_segments(group.segments, start, stop)
