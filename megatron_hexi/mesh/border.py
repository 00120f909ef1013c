"""The border between two stages: the rows that each rank holds, and the messages that carry these rows.

Sender and receiver of each message derive the same table from the plan, without communication. A row is one
position of one sample. Each rank that holds a row in the receiving stage gets it directly from a rank that
holds the row in the sending stage. Where several ranks hold the same rows (tensor parallelism without
sequence parallelism), each of them sends a part. No rank leads, nothing is broadcast, and no size must divide
another.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_hexi.mesh.mesh import Mesh
from megatron_hexi.plan.batch_balance import batch_domain
from megatron_hexi.plan.layout import merge_segments, shard_segments, slice_segments
from megatron_hexi.plan.model import Domain, Range
from megatron_hexi.plan.units import Unit


@dataclass(frozen=True)
class HeldRows:
    """The rows of a stage's [S, B, hidden] activations that one rank holds.

    Args:
        positions: ranges of positions of the sequence that the rank holds, ascending, without padding.
        rows: number of rows of the rank's tensor per sample, padding included (L).
    """

    rank: int
    positions: tuple[Range, ...]
    samples: Range
    rows: int

    def local(self, positions: Sequence[Range]) -> tuple[Range, ...]:
        """Convert ranges of positions that the rank holds to ranges of rows of the rank's tensor."""
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
    """A block of rows in a message: ranges of positions of the sequence, for a range of samples."""

    positions: tuple[Range, ...]
    samples: Range

    @property
    def num_rows(self) -> int:
        """Number of rows, over all samples."""
        return sum(stop - start for start, stop in self.positions) * (self.samples[1] - self.samples[0])


@dataclass(frozen=True)
class RowMessage:
    """The message with all rows of one micro-batch that a rank sends to a rank of the next stage.

    Args:
        source: rank in the sending stage; gradients are sent from `target` to `source`.
    """

    source: int
    target: int
    blocks: tuple[RowBlock, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows, over all samples."""
        return sum(block.num_rows for block in self.blocks)


def held_rows(mesh: Mesh, rank: int, documents: tuple[int, ...] | None = None) -> HeldRows:
    """Return the rows that a rank holds outside attention and outside tensor-parallel layers.

    Args:
        documents: lengths of the documents of the sequence; ``None``: the sequence is one document.
    """
    unit = mesh.units[rank]
    return _held(mesh, unit, rank, batch_domain(unit.domain, documents, unit.rates))


def _held(mesh: Mesh, unit: Unit, rank: int, domain: Domain) -> HeldRows:
    """Return the rows of a rank of a unit, of the unit's domain in one batch."""
    group = domain.groups[unit.group]
    number = next(n for n, member in enumerate(group.members) if member.ranks == unit.ranks)
    positions = shard_segments(group, number)
    parts, multiple = mesh.row_parts(unit), mesh.row_multiple(unit)
    # As `LocalShard` pads them.
    rows = max(1, -(-group.members[number].tokens // multiple)) * multiple // parts
    if parts > 1:
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
    """Return the messages from one stage of a replica to a neighbouring stage for one micro-batch.

    In the forward pass the messages carry activations. In the backward pass the same messages carry gradients
    in the reverse direction: every rank that holds a row in the target stage holds the row's whole gradient.

    Args:
        documents: lengths of the documents of the sequence; ``None``: the sequence is one document.
        domains: for each of the two stages, the number of the domain that processes the micro-batch;
            ``None``: all domains process some of its samples.
    """
    sides: list[list[HeldRows]] = []
    for stage, domain in zip((source, target), domains, strict=True):
        units = {rank: mesh.units[rank] for rank in mesh.stage_ranks(replica, stage)}
        taking = {rank: unit for rank, unit in units.items() if domain in (None, unit.number)}
        dealt = {
            unit.number: batch_domain(unit.domain, documents, unit.rates)
            for unit in {unit.number: unit for unit in taking.values()}.values()
        }
        sides.append([_held(mesh, unit, rank, dealt[unit.number]) for rank, unit in taking.items()])
    return row_messages(*sides)


def row_messages(sources: Sequence[HeldRows], targets: Sequence[HeldRows]) -> tuple[RowMessage, ...]:
    """Return messages by which each target rank receives each row that it holds exactly once.

    Args:
        sources: rows of the sending ranks; together these include every row of the targets.

    Returns:
        One message for each pair of ranks that transfers rows, ordered by source and target.
    """
    cuts = sorted({end for source in sources for end in source.samples})
    holders: dict[Range, _HolderIndex] = {}
    blocks: dict[tuple[int, int], list[RowBlock]] = {}
    for turn, target in enumerate(targets):
        for samples in _cut(target.samples, cuts):
            if samples not in holders:
                first, stop = samples
                held = [one for one in sources if one.samples[0] <= first and stop <= one.samples[1]]
                holders[samples] = _HolderIndex(held)
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
    """An index from positions to the ranks that hold them, with size linear in the number of ranks."""

    def __init__(self, holders: Sequence[HeldRows]) -> None:
        #: Positions at which the set of holders changes, ascending; `_owners` has the holders from there on.
        self._ends = sorted({end for holder in holders for span in holder.positions for end in span})
        owners: list[list[int]] = [[] for _ in self._ends]
        for holder in holders:
            for first, last in holder.positions:
                for place in range(bisect_left(self._ends, first), bisect_left(self._ends, last)):
                    owners[place].append(holder.rank)
        self._owners = [tuple(ranks) for ranks in owners]

    def by_holders(self, span: Range) -> Iterator[tuple[tuple[int, ...], Range]]:
        """Cut a range of positions where the holders change; yield the holders, if any, of each part."""
        for part in _cut(span, self._ends):
            place = bisect_right(self._ends, part[0]) - 1
            yield self._owners[place] if place >= 0 else (), part


def _divided(
    spans: tuple[Range, ...], owners: tuple[int, ...], turn: int
) -> Iterable[tuple[int, tuple[Range, ...]]]:
    """Divide positions equally among owners, from owner number `turn` on; yield owners with their parts."""
    total, count = sum(stop - start for start, stop in spans), len(owners)
    cuts = [total * number // count for number in range(count + 1)]
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        if start < stop:
            yield owners[(number + turn) % count], slice_segments(spans, start, stop)


def _cut(span: Range, ends: Sequence[int]) -> Iterator[Range]:
    """Cut a range at those of the ascending `ends` that lie inside it, and return the parts."""
    inside = ends[bisect_right(ends, span[0]) : bisect_left(ends, span[1])]
    return (part for part in itertools.pairwise((span[0], *inside, span[1])) if part[0] < part[1])
