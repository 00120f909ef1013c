"""The visible part of a mask as blocks that attention kernels take.

Groups hold disjoint segments, so a segment of queries sees each segment of keys before it whole, and none
after it: without a window the blocks are rectangles, and one causal triangle for each document in a group's
own part. A window hides keys that are too far behind. Its edge runs diagonally, and is covered by mirrored
causal triangles, which every kernel can compute.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from megatron_hexi.plan.layout import merge_segments
from megatron_hexi.plan.mask import Mask
from megatron_hexi.plan.model import Group, Range


class Shape(Enum):
    """The shape of a block's visible pairs."""

    FULL = "full"
    #: As many queries as keys; query i sees keys up to i.
    CAUSAL = "causal"
    #: As many queries as keys; query i sees keys from i on.
    WINDOW_EDGE = "window edge"


@dataclass(frozen=True)
class Block:
    """A range of a group's queries and a range of keys that one kernel computes together.

    Args:
        queries: range of the tokens of the group that computes, ascending.
        keys: range of the available keys: the group's own, or those received from another group.
        shape: which pairs are visible.
    """

    queries: Range
    keys: Range
    shape: Shape = Shape.FULL

    @property
    def area(self) -> int:
        """Number of visible pairs."""
        rows = self.queries[1] - self.queries[0]
        if self.shape is Shape.FULL:
            return rows * (self.keys[1] - self.keys[0])
        return rows * (rows + 1) // 2


@dataclass(frozen=True, eq=False)
class Call:
    """Blocks of one shape that one kernel call computes, queries and keys ascending without overlap.

    Compared by identity, so that results can be cached by call.
    """

    blocks: tuple[Block, ...]

    @property
    def shape(self) -> Shape:
        """Shape of all its blocks."""
        return self.blocks[0].shape

    @property
    def queries(self) -> tuple[Range, ...]:
        """Query range of each block."""
        return tuple(block.queries for block in self.blocks)

    @property
    def keys(self) -> tuple[Range, ...]:
        """Key range of each block."""
        return tuple(block.keys for block in self.blocks)


def together(blocks: Iterable[Block]) -> tuple[Call, ...]:
    """Return few kernel calls that compute all blocks: each block joins the first call that it can follow.

    Without a window there are at most two, a causal and a full one, for any number of documents.
    """
    calls: list[list[Block]] = []
    for block in blocks:
        for call in calls:
            if _can_follow(call[-1], block):
                call.append(block)
                break
        else:
            calls.append([block])
    return tuple(Call(tuple(call)) for call in calls)


def _can_follow(block: Block, following: Block) -> bool:
    return (
        block.shape is following.shape
        and block.queries[1] <= following.queries[0]
        and block.keys[1] <= following.keys[0]
    )


@dataclass(frozen=True)
class Visible:
    """The keys of another group that a group's queries see.

    Args:
        rows: tokens of the other group that some query sees, ascending: the tokens to be sent.
        blocks: the visible pairs; keys are counted over `rows`.
    """

    rows: tuple[Range, ...]
    blocks: tuple[Block, ...]

    @property
    def keys(self) -> int:
        """Number of keys to be sent."""
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class _Piece:
    """The part of a segment within one document: positions `[start, stop)`, group tokens from `offset`."""

    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """The group's token after the last of the piece."""
        return self.offset + self.stop - self.start

    def rows(self, start: int, stop: int) -> Range:
        """Return a range of positions as tokens of the group."""
        return self.offset + start - self.start, self.offset + stop - self.start


def own_blocks(group: Group, mask: Mask, seq_length: int) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Return the blocks of a group's own keys.

    Args:
        group: a group with tokens.
        mask: the mask.
        seq_length: tokens of the sequence.

    Returns:
        Blocks that cover every query exactly once, and the further blocks that a window needs.
    """
    if not mask.causal:
        return (Block((0, group.tokens), (0, group.tokens)),), ()
    first: list[Block] = []
    further: list[Block] = []
    for pieces in _by_document(group.segments, mask.ranges(seq_length)).values():
        rows = pieces[0].offset, pieces[-1].end
        if mask.window is None or pieces[-1].stop - pieces[0].start <= mask.window + 1:
            first.append(Block(rows, rows, Shape.CAUSAL))
            continue
        short = [cut for piece in pieces for cut in _cut(piece, mask.window + 1)]
        for number, piece in enumerate(short):
            rows = piece.rows(piece.start, piece.stop)
            first.append(Block(rows, rows, Shape.CAUSAL))
            further += _before(piece, short[:number], mask.window)
    return tuple(first), tuple(further)


def exchange_blocks(group: Group, source: Group, mask: Mask, seq_length: int) -> Visible:
    """Return the blocks of `group`'s queries and `source`'s keys; neighbours with equal keys are merged.

    Args:
        group: the group that computes.
        source: another group.
        mask: the mask.
        seq_length: tokens of the sequence.
    """
    if not mask.causal:
        whole = Block((0, group.tokens), (0, source.tokens))
        return _compressed([whole] if whole.area else [])
    documents = mask.ranges(seq_length)
    keys = _by_document(source.segments, documents)
    blocks: list[Block] = []
    for document, pieces in _by_document(group.segments, documents).items():
        for piece in pieces:
            for block in _before(piece, keys.get(document, []), mask.window):
                blocks.append(
                    _joined(blocks.pop(), block) if blocks and _are_one(blocks[-1], block) else block
                )
    return _compressed(blocks)


def _are_one(block: Block, following: Block) -> bool:
    return (block.keys, block.queries[1], block.shape, following.shape) == (
        following.keys,
        following.queries[0],
        Shape.FULL,
        Shape.FULL,
    )


def _joined(block: Block, following: Block) -> Block:
    return Block((block.queries[0], following.queries[1]), block.keys)


def _before(queries: _Piece, keys: Sequence[_Piece], window: int | None) -> list[Block]:
    """Return the blocks of a piece of queries and earlier pieces of keys of the same document."""
    keys = [piece for piece in keys if piece.stop <= queries.start]
    if not keys:
        return []
    if window is None:  # neighbours in the group, too, so one range
        return [
            Block(
                queries.rows(queries.start, queries.stop),
                (keys[0].offset, keys[-1].end),
            )
        ]
    blocks: list[Block] = []
    for piece in keys:
        # The last query that sees the first of these keys, the last that sees any.
        whole, any_of_it = piece.start + window + 1, piece.stop + window
        rows = queries.start, min(queries.stop, whole)
        if rows[0] < rows[1]:
            blocks.append(Block(queries.rows(*rows), piece.rows(piece.start, piece.stop)))
        edge = max(queries.start, whole), min(queries.stop, any_of_it)
        if edge[0] >= edge[1]:
            continue
        first, last = edge[0] - window, edge[1] - window
        blocks.append(Block(queries.rows(*edge), piece.rows(first, last), Shape.WINDOW_EDGE))
        if last < piece.stop:
            blocks.append(Block(queries.rows(*edge), piece.rows(last, piece.stop)))
    return blocks


@lru_cache(maxsize=2**10)  # asked for each pair of groups
def _by_document(segments: tuple[Range, ...], documents: tuple[Range, ...]) -> dict[int, list[_Piece]]:
    """Return a group's pieces by number of their document, ascending."""
    pieces: dict[int, list[_Piece]] = {}
    document = offset = 0
    for start, stop in merge_segments(segments):
        while start < stop:
            while documents[document][1] <= start:
                document += 1
            end = min(stop, documents[document][1])
            pieces.setdefault(document, []).append(_Piece(start, end, offset))
            offset += end - start
            start = end
    return pieces


def _cut(piece: _Piece, most: int) -> list[_Piece]:
    """Return a piece, cut into parts of at most `most` tokens."""
    return [
        _Piece(start, min(start + most, piece.stop), piece.offset + start - piece.start)
        for start in range(piece.start, piece.stop, most)
    ]


def _compressed(blocks: Sequence[Block]) -> Visible:
    """Return blocks, with keys counted over the tokens to be sent rather than over the group."""
    rows = _union(block.keys for block in blocks)
    starts = [start for start, _ in rows]
    offsets = [0, *itertools.accumulate(stop - start for start, stop in rows)]
    moved = []
    for block in blocks:
        place = bisect.bisect_right(starts, block.keys[0]) - 1
        shift = offsets[place] - starts[place]
        moved.append(Block(block.queries, (block.keys[0] + shift, block.keys[1] + shift), block.shape))
    return Visible(rows, tuple(moved))


def _union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)
