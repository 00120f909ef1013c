"""Attention masks, and the blocks of their visible pairs that attention kernels can compute.

Groups hold disjoint segments, so a segment of queries sees every key of an earlier segment and no key of a
later one. Without a window the blocks are therefore rectangles and, among a group's own keys, one causal
triangle for each document. A sliding window hides keys that are too far behind. The window's edge runs
diagonally and is covered by mirrored causal triangles, which every kernel can compute.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from megatron_hexi.plan.layout import consecutive, merge_segments
from megatron_hexi.plan.model import Group, Range


@dataclass(frozen=True)
class Mask:
    """An attention mask: the keys that each query sees, within the query's document.

    Args:
        causal: whether a token sees only itself and earlier tokens. Windows and documents need a causal mask.
        window: number of earlier keys that a query sees; ``None``: all earlier keys.
        documents: lengths of the documents of the sequence; ``None``: the sequence is one document.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.causal or (self.window is None and self.documents is None)

    def ranges(self, seq_length: int) -> tuple[Range, ...]:
        """Return the range of positions of each document that is not empty.

        Args:
            seq_length: tokens of the sequence; equals the sum of the documents' lengths.
        """
        return _ranges((seq_length,) if self.documents is None else self.documents, seq_length)


@lru_cache(maxsize=64)  # asked for each pair of groups
def _ranges(documents: tuple[int, ...], seq_length: int) -> tuple[Range, ...]:
    ranges = tuple((start, stop) for start, stop in consecutive(documents) if start < stop)
    assert sum(documents) == seq_length, "documents cover the sequence"
    return ranges


class Shape(Enum):
    """The pairs of query and key that are visible in a block: all, a causal triangle, or a mirrored one."""

    FULL = "full"
    #: A square block in which query i sees the keys 0 … i.
    CAUSAL = "causal"
    #: A square block in which query i sees the keys from i to the last.
    WINDOW_EDGE = "window edge"


@dataclass(frozen=True)
class Block:
    """A range of queries and a range of keys whose attention one kernel call computes.

    Args:
        queries: range of queries, as indices into the tokens of the computing group.
        keys: range of keys, as indices into the group's own keys or into the keys received from another
            group.
        shape: pairs of query and key that are visible.
    """

    queries: Range
    keys: Range
    shape: Shape = Shape.FULL

    @property
    def area(self) -> int:
        """Number of visible pairs of query and key in the block."""
        rows = self.queries[1] - self.queries[0]
        if self.shape is Shape.FULL:
            return rows * (self.keys[1] - self.keys[0])
        return rows * (rows + 1) // 2


@dataclass(frozen=True, eq=False)
class Call:
    """A kernel call: blocks of one shape in ascending order, no two of which share queries or keys.

    Calls are compared by identity, so that results can be cached by call.
    """

    blocks: tuple[Block, ...]

    @property
    def shape(self) -> Shape:
        """Shape of all blocks of the call."""
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
    """Combine blocks into few kernel calls: each block joins the first call that it can follow.

    Without a window there are at most two calls for any number of documents: a causal and a full one.
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
    """The keys of another group that some query of this group sees.

    Args:
        rows: tokens of the other group whose keys are seen and must be sent, ascending.
        blocks: blocks of visible pairs; their keys are indices into the sent tokens `rows`.
    """

    rows: tuple[Range, ...]
    blocks: tuple[Block, ...]

    @property
    def keys(self) -> int:
        """Number of keys to be sent."""
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class _Piece:
    """The part of a segment that lies in one document.

    Its positions are `[start, stop)`; its first token is token `offset` of the group.
    """

    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """Index in the group's tokens just after the piece's last token."""
        return self.offset + self.stop - self.start

    def rows(self, start: int, stop: int) -> Range:
        """Convert a range of positions to a range of indices into the group's tokens."""
        return self.offset + start - self.start, self.offset + stop - self.start


def own_blocks(group: Group, mask: Mask, seq_length: int) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Return blocks of own keys with every query exactly once, and further ones of a sliding window."""
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
    """Return the keys of `source` that the queries of `group` see, with the blocks to compute.

    Adjacent blocks with equal keys are merged.
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
                if blocks and _are_one(blocks[-1], block):
                    block = Block((blocks.pop().queries[0], block.queries[1]), block.keys)
                blocks.append(block)
    return _compressed(blocks)


def _are_one(block: Block, following: Block) -> bool:
    are_full = block.shape is following.shape is Shape.FULL
    return are_full and block.keys == following.keys and block.queries[1] == following.queries[0]


def _before(queries: _Piece, keys: Sequence[_Piece], window: int | None) -> list[Block]:
    """Return the blocks of one piece of queries with all earlier pieces of keys in the same document."""
    keys = [piece for piece in keys if piece.stop <= queries.start]
    if not keys:
        return []
    if window is None:  # neighbours in the group, too, so one range
        return [Block(queries.rows(queries.start, queries.stop), (keys[0].offset, keys[-1].end))]
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
    """Cut segments at document boundaries; return the pieces by document number, ascending."""
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
    """Cut a piece into consecutive pieces of at most `most` tokens."""
    return [
        _Piece(start, min(start + most, piece.stop), piece.offset + start - piece.start)
        for start in range(piece.start, piece.stop, most)
    ]


def _compressed(blocks: Sequence[Block]) -> Visible:
    """Renumber the keys of blocks: from indices into the group's tokens to indices into the sent tokens."""
    rows = merge_segments(block.keys for block in blocks)
    starts = [start for start, _ in rows]
    offsets = [0, *itertools.accumulate(stop - start for start, stop in rows)]
    moved = []
    for block in blocks:
        place = bisect.bisect_right(starts, block.keys[0]) - 1
        shift = offsets[place] - starts[place]
        moved.append(Block(block.queries, (block.keys[0] + shift, block.keys[1] + shift), block.shape))
    return Visible(rows, tuple(moved))
