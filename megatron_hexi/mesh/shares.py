"""Ownership of the optimizer's state: buckets of pieces, cut by the shares of their holders.

The pieces that the same ranks hold lie one after the other in flat buckets, in the order in which the
backward pass completes their gradients. Each bucket is cut into one run of slabs for each holder, its share.
Gradients are reduced to the owner of each run, which updates it and sends the new values to all holders.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_hexi.mesh.pieces import Cell, MinistageId, Piece, cell_size
from megatron_hexi.plan.model import Range


@dataclass(frozen=True)
class Slab:
    """Rows of a piece with one owner.

    Args:
        key: name of the weight.
        cell: the part of the weight.
        shape: of the whole weight.
        owner: rank that keeps its optimizer state.
        start: first of its elements in the bucket.
    """

    key: str
    cell: Cell
    shape: tuple[int, ...]
    owner: int
    start: int

    @property
    def stop(self) -> int:
        """End of its elements in the bucket."""
        return self.start + cell_size(self.cell)


@dataclass(frozen=True)
class Bucket:
    """Pieces with the same holders, reduced and gathered together.

    Args:
        holders: the ranks, ascending.
        pieces: the pieces, in order.
        starts: first element of each piece in the bucket.
        slabs: the same elements by owner; an owner's slabs are adjacent.
        depth: the least depth of the pieces: the backward pass completes all gradients there.
        used_in: for each holder the only ministage that uses it; ``None``: there is no such ministage.
    """

    holders: tuple[int, ...]
    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]
    slabs: tuple[Slab, ...]
    depth: int
    used_in: tuple[MinistageId | None, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.slabs[-1].stop

    def ministage_of(self, holder: int) -> int | None:
        """Return the number of the only ministage in which a holder uses it; ``None``: there is none."""
        used_in = self._use_of[holder]
        return None if used_in is None else used_in[2]

    @cached_property
    def in_step(self) -> bool:
        """Whether it has several holders, and all use it in the same ministage."""
        return len(self.holders) > 1 and len(set(self.used_in)) == 1

    @cached_property
    def _use_of(self) -> dict[int, MinistageId | None]:
        return dict(zip(self.holders, self.used_in, strict=True))

    def run(self, owner: int) -> Range:
        """Return the elements of an owner; empty without any."""
        slabs = [slab for slab in self.slabs if slab.owner == owner]
        return (slabs[0].start, slabs[-1].stop) if slabs else (0, 0)


def make_buckets(
    pieces: Sequence[Piece], weights: Mapping[int, int], bucket_size: int | None
) -> tuple[Bucket, ...]:
    """Return all buckets, in the order in which every rank reduces those that it holds.

    The order is the same on all ranks, so that no two ranks wait for each other in two of them.

    Args:
        pieces: the pieces of `cut_pieces`.
        weights: share of each rank in the state, relative to ranks that hold the same weights.
        bucket_size: elements after which a bucket is closed; ``None``: one bucket for each set of holders and
            their ministages.
    """
    by_use: dict[tuple[tuple[int, ...], tuple[MinistageId | None, ...]], list[Piece]] = {}
    for piece in pieces:
        by_use.setdefault((piece.holders, piece.used_in), []).append(piece)
    owned = {holders: dict.fromkeys(holders, 0) for holders, _ in by_use}
    buckets = []
    for (holders, _), pieces_of_use in by_use.items():
        for run in _runs(pieces_of_use, bucket_size):
            buckets.append(_bucket(holders, run, weights, owned[holders]))
    return tuple(sorted(buckets, key=lambda bucket: (-bucket.depth, bucket.holders)))


def _runs(pieces: Sequence[Piece], bucket_size: int | None) -> list[list[Piece]]:
    runs: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if bucket_size is not None and runs[-1] and size >= bucket_size:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += piece.size
    return runs


def _bucket(
    holders: tuple[int, ...], pieces: Sequence[Piece], weights: Mapping[int, int], owned: dict[int, int]
) -> Bucket:
    """Return a bucket in which each owner gets what it lacks of its share of all buckets so far.

    Shares of one bucket are met within a row of a piece, those of several within two.

    Args:
        holders: the ranks.
        pieces: pieces of the bucket.
        weights: shares of the ranks.
        owned: elements that each holder owns in earlier buckets; updated.
    """
    starts = (0, *itertools.accumulate(piece.size for piece in pieces))
    size, total = starts[-1], sum(weights[rank] for rank in holders)
    target = size + sum(owned.values())
    lacking = [max(0.0, target * weights[rank] / total - owned[rank]) for rank in holders]
    scale = size / sum(lacking)
    ends = [end * scale for end in itertools.accumulate(lacking)]
    slabs: list[Slab] = []
    owner, at = 0, 0
    for piece in pieces:
        # The first axis along which it can be cut; elements of one index of it lie together.
        axis = next((a for a, (low, high) in enumerate(piece.cell) if high - low > 1), 0)
        low, high = piece.cell[axis]
        row = piece.size // (high - low)
        while low < high:
            while owner < len(holders) - 1 and at + row / 2 > ends[owner]:
                owner += 1
            count = high - low
            if owner < len(holders) - 1:
                count = max(1, min(count, round((ends[owner] - at) / row)))
            cell = (*piece.cell[:axis], (low, low + count), *piece.cell[axis + 1 :])
            slabs.append(Slab(piece.key, cell, piece.shape, holders[owner], at))
            owned[holders[owner]] += count * row
            at, low = at + count * row, low + count
    depth = min(piece.depth for piece in pieces)
    return Bucket(holders, tuple(pieces), starts[:-1], tuple(slabs), depth, pieces[0].used_in)
