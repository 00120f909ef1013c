"""Blocks of a pipeline: consecutive equal stages on the same pools.

Pools of GPUs are joined to blocks; a block's stages all have the same part of each of its pools.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from megatron_hexi.planner.joint.pools import Counts, Pools, StageShape, pools_of
from megatron_hexi.planner.search.groupings import set_partitions

#: The most stages of a block whose stages mix kinds of GPU.
_DEEPEST_MIXED = 4
#: The part of a block's units that its equal stages may leave unused.
_LEFT_OVER = 1 / 8
#: All partitions of up to this many pools are tried; of more pools, some.
_FEW = 3


class StageBlock(NamedTuple):
    """Consecutive stages of one shape."""

    shape: StageShape
    stages: int


class StageRuns:
    """The blocks into which a replica's GPUs can be cut.

    Args:
        widths: tensor-parallel sizes that are tried.
        deepest: the most stages of a block.
        size: number of tensor-parallel units of a stage; ``None``: any number.
    """

    def __init__(self, pools: Pools, widths: Sequence[int], deepest: int, size: int | None = None) -> None:
        self._pools, self._widths, self._deepest, self._size = pools, widths, deepest, size
        self.options = cache(self._options)

    def partitions(self, counts: Counts) -> Iterator[tuple[Counts, ...]]:
        """Yield partitions of the pools into blocks, in a few orders: by speed both ways, and by memory."""
        kinds = pools_of(counts)
        for partition in _partitions(kinds):
            blocks = [
                tuple(count if pool in block else 0 for pool, count in enumerate(counts))
                for block in partition
            ]
            partitions = [tuple(blocks), tuple(blocks[::-1])]
            if len(blocks) > 2:
                partitions.append(tuple(sorted(blocks, key=lambda block: -self._memory(block))))
            yield from dict.fromkeys(partitions)

    def _memory(self, counts: Counts) -> float:
        pools = self._pools.pools
        return sum(count * pool.device.usable_gib for count, pool in zip(counts, pools, strict=True)) / sum(
            counts
        )

    def _options(self, counts: Counts, only: int | None) -> list[StageBlock]:
        """Return possible blocks on these GPUs: equal stages, aligned with nodes, few GPUs left over."""
        blocks = []
        kinds = pools_of(counts)
        pools = self._pools.pools
        for width in self._widths if only is None else [only]:
            # Units lie inside nodes.
            units = [
                count // width
                if count <= pool.size or pool.size % width == 0
                else count // pool.size * (pool.size // width)
                for count, pool in zip(counts, pools, strict=True)
            ]
            for depth in range(1, self._deepest + 1):
                if len(kinds) > 1 and depth > _DEEPEST_MIXED:
                    break
                each = tuple(number // depth * width for number in units)
                if any(not each[pool] for pool in kinds):
                    break
                if self._size is not None:
                    fixed = _trimmed(each, kinds, width, self._size)
                    if fixed is not None:
                        blocks.append(StageBlock(StageShape(fixed, width), depth))
                    continue
                used = width * sum(units)
                aligned = depth == 1 or all(self._pools.tiles(pool, each[pool], width) for pool in kinds)
                if used - depth * sum(each) <= _LEFT_OVER * used and aligned:
                    blocks.append(StageBlock(StageShape(each, width), depth))
        return blocks


def _trimmed(each: Counts, kinds: list[int], width: int, size: int) -> Counts | None:
    """Return a stage's GPUs with all but `size` units removed, last pool first; ``None``: too few units."""
    counts, surplus = list(each), sum(each) // width - size
    for pool in reversed(kinds):
        less = max(0, min(surplus, counts[pool] // width - 1))
        counts[pool] -= less * width
        surplus -= less
    return tuple(counts) if surplus == 0 else None


def _partitions(kinds: list[int]) -> Iterator[list[list[int]]]:
    """Yield partitions of pools into blocks: all of few pools, else some with one or two mixed blocks."""
    if len(kinds) <= _FEW:
        yield from set_partitions(kinds)
        return
    yield [kinds]
    yield [[kind] for kind in kinds]
    yield [kinds[: len(kinds) // 2], kinds[len(kinds) // 2 :]]
    for first, second in itertools.pairwise(kinds):
        yield [[first, second], *([kind] for kind in kinds if kind not in (first, second))]
