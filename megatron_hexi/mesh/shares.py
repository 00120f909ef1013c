"""Divide the optimizer's state: put pieces of weights into buckets, and cut each bucket into shares.

Pieces with the same holders lie one after the other in flat buckets, in the order in which the backward pass
completes their gradients. The share of a holder is one run of adjacent slabs of the bucket. The holder owns
this run: gradients are reduced to the owner, which updates the weights and sends their values to all holders.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_hexi.grouping import grouped
from megatron_hexi.mesh.pieces import Cell, MinistageId, Piece, cell_size
from megatron_hexi.plan.model import Range


@dataclass(frozen=True)
class Slab:
    """A part of a piece, cut along rows, whose optimizer state one rank owns.

    Args:
        owner: rank that keeps the slab's optimizer state.
        start: index of the slab's first element in the bucket.
    """

    key: str
    cell: Cell
    shape: tuple[int, ...]
    owner: int
    start: int

    @property
    def stop(self) -> int:
        """Index in the bucket just after the slab's last element."""
        return self.start + cell_size(self.cell)


@dataclass(frozen=True)
class Bucket:
    """Pieces with the same holders, whose gradients are reduced, and whose weights are gathered, together.

    Args:
        holders: ranks that hold the bucket, ascending.
        starts: index of the first element of each piece in the bucket.
        slabs: slabs that divide the bucket's elements among owners; the slabs of one owner are adjacent.
        depth: smallest depth of the pieces; there the backward pass completes all gradients of the bucket.
        used_in: for each holder, the only ministage that uses the bucket; ``None``: no ministage or several.
    """

    holders: tuple[int, ...]
    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]
    slabs: tuple[Slab, ...]
    depth: int
    used_in: tuple[MinistageId | None, ...]

    @property
    def size(self) -> int:
        """Number of elements of the bucket."""
        return self.slabs[-1].stop

    def ministage_of(self, holder: int) -> int | None:
        """Return the only ministage in which a holder uses the bucket; ``None``: none or several."""
        used_in = self._use_of[holder]
        return None if used_in is None else used_in[2]

    @cached_property
    def in_step(self) -> bool:
        """Whether the bucket has several holders that all use it in the same ministage."""
        return len(self.holders) > 1 and len(set(self.used_in)) == 1

    @cached_property
    def _use_of(self) -> dict[int, MinistageId | None]:
        return dict(zip(self.holders, self.used_in, strict=True))

    def run(self, owner: int) -> Range:
        """Return the range of elements that a rank owns; empty if the rank owns none."""
        slabs = [slab for slab in self.slabs if slab.owner == owner]
        return (slabs[0].start, slabs[-1].stop) if slabs else (0, 0)


def make_buckets(
    pieces: Sequence[Piece], weights: Mapping[int, int], bucket_size: int | None
) -> tuple[Bucket, ...]:
    """Put pieces into buckets; return all buckets in the order in which ranks reduce them.

    The order is the same on all ranks, so that no two ranks wait for each other in different buckets.

    Args:
        weights: weight of each rank in the division of the optimizer's state among ranks with the same
            pieces.
        bucket_size: number of elements after which a bucket is closed; ``None``: one bucket for each set of
            holders and ministages.
    """
    by_use = grouped(((piece.holders, piece.used_in), piece) for piece in pieces)
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
    """Return a bucket whose elements are divided so that each holder has its share of all buckets so far.

    For one bucket, shares are exact to one row of a piece; for several buckets, to two rows.

    Args:
        owned: number of elements that each holder owns in earlier buckets; updated.
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
