"""The positions of the sequence that each group and each shard holds.

The layout for causal attention is a nested, weighted zigzag: each group holds one front segment and one back
segment, each of half the group's tokens; front segments lie in group order, back segments in reverse group
order. The number of visible pairs of a group is then tokens_g x S / 2, whatever the other groups hold.
Between an outer and an inner group the mask is rectangular: all queries of the inner group see the keys of
the outer group's front segment, and the queries of the outer group's back segment see all keys of the inner
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_hexi.plan.model import Domain, Group, Range


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into integers in proportion to `weights`, by largest remainder (ties to the first).

    Source: Hamilton's method of apportionment. No integer is further than one from its exact share.
    """
    scale = sum(weights)
    exact = [total * weight / scale for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def causal_segments(tokens: Sequence[int]) -> list[tuple[Range, ...]]:
    """Return the nested front and back segments of groups of the given sizes in tokens, outermost first."""
    fronts = consecutive([count // 2 for count in tokens])
    middle = sum(count // 2 for count in tokens)
    backs = consecutive([count - count // 2 for count in reversed(tokens)], start=middle)
    return [merge_segments([front, back]) for front, back in zip(fronts, reversed(backs), strict=True)]


def full_segments(tokens: Sequence[int]) -> list[tuple[Range, ...]]:
    """Return one segment for each group, in group order: the layout for attention without a causal mask."""
    return [merge_segments([segment]) for segment in consecutive(tokens)]


def consecutive(sizes: Iterable[int], start: int = 0) -> list[Range]:
    """Return adjacent ranges of the given sizes, the first beginning at `start`."""
    ranges = []
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    return ranges


def merge_segments(segments: Iterable[Range]) -> tuple[Range, ...]:
    """Sort segments in ascending order, join those that touch or overlap, and drop empty ones."""
    merged: list[Range] = []
    for start, stop in sorted(segments):
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def slice_segments(segments: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """Return the segments that hold the tokens `[start, stop)`, counted over all of `segments`."""
    pieces = []
    offset = 0
    for first, last in segments:
        low, high = max(start - offset, 0), min(stop - offset, last - first)
        if low < high:
            pieces.append((first + low, first + high))
        offset += last - first
    return merge_segments(pieces)


def shard_segments(group: Group, member: int) -> tuple[Range, ...]:
    """Return the positions, as segments, of the shard of the group's member with the given number."""
    start, stop = consecutive(m.tokens for m in group.members)[member]
    return slice_segments(group.segments, start, stop)


def held_positions(domain: Domain) -> tuple[tuple[Range, ...], ...]:
    """Return the positions, as segments, of the rows of each member of a domain, in rank order."""
    held = {
        member.lead: shard_segments(group, number)
        for group in domain.groups
        for number, member in enumerate(group.members)
    }
    return tuple(held[member.lead] for member in domain.members)
