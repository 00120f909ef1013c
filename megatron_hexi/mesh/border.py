"""The border between two stages: the rows that each rank holds, and the messages that carry them over.

Both ends of each message derive the same table from the plan, without communication. A row (a position of a
sample) travels to each rank that holds it behind the border, straight from a rank that holds it before the
border. Where several ranks hold the same rows (tensor parallelism without sequence parallelism), each of them
sends a part. No rank leads, nothing is broadcast, and no size must divide another.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_hexi.mesh.mesh import Mesh
from megatron_hexi.plan.layout import merge_segments, shard_segments, slice_segments
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.packing import packed_domain


@dataclass(frozen=True)
class HeldRows:
    """The rows that a rank holds of a stage's [S, B, hidden] activations, padding left out.

    Args:
        rank: the rank's number in the job.
        positions: positions of the sequence, ascending.
        samples: samples of the micro-batch.
        rows: local rows with padding (L).
    """

    rank: int
    positions: tuple[Range, ...]
    samples: Range
    rows: int

    def local(self, positions: Sequence[Range]) -> tuple[Range, ...]:
        """Return the local rows of some positions, a range for each range."""
        ranges = []
        for start, stop in positions:
            offset = 0
            for first, last in self.positions:
                if first <= start and stop <= last:
                    ranges.append((offset + start - first, offset + stop - first))
                    break
                offset += last - first
            else:
                raise AssertionError(f"rank {self.rank} does not hold positions [{start}, {stop})")
        return tuple(ranges)


@dataclass(frozen=True)
class RowBlock:
    """Rows of a message: positions of the sequence, for some samples."""

    positions: tuple[Range, ...]
    samples: Range

    @property
    def rows(self) -> int:
        """Number of rows, over all samples."""
        return sum(stop - start for start, stop in self.positions) * (self.samples[1] - self.samples[0])


@dataclass(frozen=True)
class RowMessage:
    """All rows that a rank sends another over a border for one micro-batch.

    Args:
        source: rank of the stage before; gradients travel from `target` to `source`.
        target: rank of the stage behind.
        blocks: the rows, in the order in which they lie in the message.
    """

    source: int
    target: int
    blocks: tuple[RowBlock, ...]

    @property
    def rows(self) -> int:
        """Number of rows, over all samples."""
        return sum(block.rows for block in self.blocks)


def held_rows(mesh: Mesh, rank: int, documents: tuple[int, ...] | None = None) -> HeldRows:
    """Return the rows that a rank holds outside attention and outside tensor-parallel layers.

    Args:
        mesh: the units of all ranks.
        rank: the rank's number in the job.
        documents: lengths of the documents of the sequence; ``None``: the sequence is one document.
    """
    unit = mesh.units[rank]
    domain = unit.domain
    if documents is not None:
        domain = packed_domain(domain, documents)
    group = domain.groups[unit.group]
    number = next(n for n, member in enumerate(group.members) if member.ranks == unit.ranks)
    positions = shard_segments(group, number)
    width = unit.width if mesh.sequence_parallel else 1
    rows = max(1, -(-unit.tokens // width))  # as `LocalShard` pads them
    if width > 1:
        first = unit.ranks.index(rank) * rows
        positions = slice_segments(positions, first, first + rows)
    return HeldRows(rank, positions, unit.samples, rows)


def border_messages(
    mesh: Mesh,
    replica: int,
    source: int,
    target: int,
    documents: tuple[int, ...] | None = None,
    domains: tuple[int | None, int | None] = (None, None),
) -> tuple[RowMessage, ...]:
    """Return the messages from one stage of a replica to a neighbour for one micro-batch.

    Forward these are activations. Backward they are gradients: behind the border every rank that holds a row
    holds its whole gradient, so the same table applies.

    Args:
        mesh: the units of all ranks.
        replica: number of the replica.
        source: number of the stage that sends.
        target: number of the stage that receives.
        documents: lengths of the documents of the sequence; ``None``: the sequence is one document.
        domains: the number of the domain that takes the micro-batch in each of the two stages; ``None``: all
            take some of its samples.
    """
    sides = [
        [
            held_rows(mesh, rank, documents)
            for rank in mesh.stage_ranks(replica, stage)
            if domain in (None, mesh.units[rank].number)
        ]
        for stage, domain in zip((source, target), domains, strict=True)
    ]
    return row_messages(*sides)


def row_messages(sources: Sequence[HeldRows], targets: Sequence[HeldRows]) -> tuple[RowMessage, ...]:
    """Return the messages with which each target receives each of its rows once.

    Args:
        sources: rows held by the sending ranks; together every row that a target holds.
        targets: rows held by the receiving ranks.

    Returns:
        At most one message a pair of ranks, ordered by source and target; none for pairs without common rows.
    """
    cuts = sorted({end for source in sources for end in source.samples})
    holders: dict[Range, _HolderIndex] = {}
    blocks: dict[tuple[int, int], list[RowBlock]] = {}
    for turn, target in enumerate(targets):
        for samples in _cut(target.samples, cuts):
            if samples not in holders:
                holders[samples] = _HolderIndex(
                    [source for source in sources if _contains(source.samples, samples)]
                )
            by_holders: dict[tuple[int, ...], list[Range]] = {}
            for span in target.positions:
                for owners, part in holders[samples].by_holders(span):
                    assert owners, f"nobody holds positions {part} of samples {samples}"
                    by_holders.setdefault(owners, []).append(part)
            for owners, spans in by_holders.items():
                for owner, part_spans in _divided(merge_segments(spans), owners, turn):
                    blocks.setdefault((owner, target.rank), []).append(RowBlock(part_spans, samples))
    return tuple(RowMessage(*pair, tuple(row_blocks)) for pair, row_blocks in sorted(blocks.items()))


class _HolderIndex:
    """An index from positions to the ranks that hold them, linear in the number of ranks.

    Args:
        holders: rows of ranks that hold the same samples.
    """

    def __init__(self, holders: Sequence[HeldRows]) -> None:
        #: Positions at which holders change, and the ranks that hold the positions from there on.
        self._ends = sorted({end for holder in holders for span in holder.positions for end in span})
        owners: list[list[int]] = [[] for _ in self._ends]
        for holder in holders:
            for first, last in holder.positions:
                for place in range(bisect_left(self._ends, first), bisect_left(self._ends, last)):
                    owners[place].append(holder.rank)
        self._owners = [tuple(ranks) for ranks in owners]

    def by_holders(self, span: Range) -> Iterator[tuple[tuple[int, ...], Range]]:
        """Yield a range of positions, cut where holders change, each part with its holders (perhaps none)."""
        for part in _cut(span, self._ends):
            place = bisect_right(self._ends, part[0]) - 1
            yield self._owners[place] if place >= 0 else (), part


def _divided(
    spans: tuple[Range, ...], owners: tuple[int, ...], turn: int
) -> Iterable[tuple[int, tuple[Range, ...]]]:
    """Yield equal parts of some positions, one for each holder; `turn` changes who sends the first."""
    total, count = sum(stop - start for start, stop in spans), len(owners)
    cuts = [total * number // count for number in range(count + 1)]
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        if start < stop:
            yield owners[(number + turn) % count], slice_segments(spans, start, stop)


def _cut(span: Range, ends: Sequence[int]) -> Iterator[Range]:
    """Return the parts of a range, cut at the ends inside it; `ends` ascend."""
    inside = ends[bisect_right(ends, span[0]) : bisect_left(ends, span[1])]
    return (part for part in itertools.pairwise((span[0], *inside, span[1])) if part[0] < part[1])


def _contains(outer: Range, inner: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
