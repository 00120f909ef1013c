"""Rows before a rank's own that a causal convolution reads: who sends them, and how rows are arranged.

A rank's rows are runs of adjacent positions, each in one document. A convolution of k taps reads up to
k - 1 rows before a run, its halo, which other ranks of the domain hold, or the rank itself in another run.
Before a document's first row there are zeros.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hexi.plan.layout import consecutive
from megatron_hexi.plan.model import Range


@dataclass(frozen=True)
class Halo:
    """The halo exchange of one rank, and the order in which the convolution reads rows.

    Each run is arranged behind `reach` rows before it, so that one pass over all arranged rows computes all
    runs; what it computes at these rows is not read.

    Args:
        reach: number of rows that a row reads before itself.
        sends: for each rank of the domain, the own rows that it is sent.
        receives: number of rows that each rank of the domain sends here.
        arranged: places of the arranged rows among own rows, received rows and a row of zeros, as ranges.
        own: places of the own rows among the arranged ones, as ranges.
        is_empty: whether no rank of the domain sends anything.
    """

    reach: int
    sends: tuple[tuple[int, ...], ...]
    receives: tuple[int, ...]
    arranged: tuple[Range, ...]
    own: tuple[Range, ...]
    is_empty: bool


def halo(shards: Sequence[Sequence[Range]], index: int, documents: Sequence[Range], reach: int) -> Halo:
    """Return the halo exchange of one rank of a domain.

    Args:
        shards: segments of the sequence that each rank of the domain holds, ascending.
        documents: positions of each document, ascending.
    """
    held = sorted(
        (start, stop, rank, before)
        for rank, segments in enumerate(shards)
        for (start, stop), (before, _) in zip(
            segments, consecutive(stop - start for start, stop in segments), strict=True
        )
    )
    starts = [start for start, *_ in held]

    def row_of(position: int) -> tuple[int, int]:
        """Return the rank that holds a position, and the row there."""
        start, _, rank, before = held[bisect.bisect_right(starts, position) - 1]
        return rank, before + position - start

    runs = [_runs(segments, documents) for segments in shards]
    sends: list[tuple[int, ...]] = []
    receives, received, is_empty = [0] * len(shards), {}, True
    for rank, own in enumerate(runs):
        needed = sorted({at for run, first in own for at in range(max(first, run[0] - reach), run[0])})
        rows = [(at, *row_of(at)) for at in needed]
        is_empty = is_empty and all(owner == rank for _, owner, _ in rows)
        sends.append(tuple(row for _, owner, row in rows if owner == index != rank))
        if rank == index:
            others = sorted((owner, at) for at, owner, _ in rows if owner != index)
            received = {at: number for number, (_, at) in enumerate(others)}
            for owner, _ in others:
                receives[owner] += 1
    tokens = sum(stop - start for start, stop in shards[index])
    arranged: list[Range] = []
    own_places: list[Range] = []
    done = 0
    for number, ((start, stop), first) in enumerate(runs[index]):
        for at in range(start - reach, start):
            if at < first:
                place = tokens + len(received)
            else:
                place = tokens + received[at] if at in received else row_of(at)[1]
            arranged.append((place, place + 1))
        offset = reach * (number + 1)
        own_places.append((done + offset, done + offset + stop - start))
        arranged.append((done, done + stop - start))
        done += stop - start
    return Halo(reach, tuple(sends), tuple(receives), tuple(arranged), tuple(own_places), is_empty)


def _runs(segments: Sequence[Range], documents: Sequence[Range]) -> list[tuple[Range, int]]:
    """Return the parts of segments that are in one document each, with the document's first position."""
    runs: list[tuple[Range, int]] = []
    ends = [stop for _, stop in documents]
    for start, stop in segments:
        number = bisect.bisect_right(ends, start)
        while start < stop:
            end = min(stop, ends[number])
            runs.append(((start, end), documents[number][0]))
            start, number = end, number + 1
    return runs
