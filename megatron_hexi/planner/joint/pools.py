"""Nodes that are alike, and stages by what they take of them.

What a stage takes is decided here in numbers of GPUs; `placing` finds the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_hexi.cluster import Cards, Cluster, Device

#: GPUs of each pool.
Counts = tuple[int, ...]
#: Of more pools, sites are not told apart: partitions of the pools are enumerated.
_MOST_POOLS = 8


@dataclass(frozen=True, eq=False)
class Pool:
    """Nodes that are alike, on one site.

    Args:
        device: their GPU.
        size: GPUs of each.
        nodes: their numbers in the cluster.
        site: the part of the outermost level that they are in.
    """

    device: Device
    size: int
    nodes: tuple[int, ...]
    site: int

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.size * len(self.nodes)


class Shape(NamedTuple):
    """What a stage runs on.

    Args:
        counts: GPUs of each pool.
        width: of these, so many share each weight.
    """

    counts: Counts
    width: int

    @property
    def units(self) -> int:
        """Tensor-parallel units."""
        return sum(self.counts) // self.width

    @property
    def kinds(self) -> list[int]:
        """Pools that it takes GPUs of."""
        return pools_of(self.counts)


def pools_of(counts: Counts) -> list[int]:
    """Pools that GPUs are taken of."""
    return [pool for pool, count in enumerate(counts) if count]


class Pools:
    """The pools of a cluster.

    Args:
        cluster: the cluster.
        pools: the fastest GPUs first.
    """

    def __init__(self, cluster: Cluster, pools: Sequence[Pool]) -> None:
        self.cluster, self.pools = cluster, tuple(pools)

    @classmethod
    def of(cls, cluster: Cluster, speeds: Sequence[float]) -> Pools:
        """All of a cluster.

        Args:
            cluster: the cluster.
            speeds: what each node's GPU does of the job's work at its best, by node.
        """
        levels = cluster.fast_domains()
        # The last partition is everything, unless there is no level above the node.
        sites = levels[-2].parts if len(levels) > 2 else ()
        found = _alike(cluster, {gpu: number for number, part in enumerate(sites) for gpu in part})
        found = found if len(found) <= _MOST_POOLS else _alike(cluster, {})
        found.sort(key=lambda pool: (-speeds[pool.nodes[0]], pool.device.name, -pool.gpus, pool.nodes[0]))
        return cls(cluster, found)

    @cached_property
    def totals(self) -> Counts:
        """GPUs that there are."""
        return tuple(pool.gpus for pool in self.pools)

    def part(self, copies: int) -> Pools:
        """Of so many equal parts the first: as many nodes of each pool."""
        parts = (replace(pool, nodes=pool.nodes[: len(pool.nodes) // copies]) for pool in self.pools)
        return Pools(self.cluster, list(parts))

    def with_memory(self, times: float) -> Pools:
        """The same nodes, whose GPUs have so many times the memory."""
        cluster = self.cluster.with_memory_margin(1 - times)
        pools = (replace(pool, device=cluster.nodes[pool.nodes[0]].device) for pool in self.pools)
        return Pools(cluster, list(pools))

    def aligned(self, pool: int, count: int) -> bool:
        """Whether stages of so many of a pool's GPUs fill nodes: whole ones, or a whole part of one."""
        size = self.pools[pool].size
        return count % size == 0 or (count < size and size % count == 0)

    def tiles(self, pool: int, count: int) -> bool:
        """Whether stages of so many of a pool's GPUs fill nodes together: whole ones, and equal parts."""
        size = self.pools[pool].size
        return count % size == 0 or size % (count % size) == 0

    def rounded(self, pool: int, count: int, width: int) -> int:
        """The most GPUs of a pool, up to so many, of which stages of whole units can be made."""
        size = self.pools[pool].size
        if count >= size:
            return count // size * size if size % width == 0 else 0
        part = max((part for part in range(1, count + 1) if size % part == 0), default=0)
        return part if part % width == 0 else 0

    def some_gpus(self, shape: Shape) -> list[int]:
        """GPUs of the cluster that such a stage could have: the first ones of each pool."""
        chosen = []
        for pool in shape.kinds:
            left = shape.counts[pool]
            for node in self.pools[pool].nodes:
                taken = list(self.cluster.nodes[node].ranks[: min(left, self.pools[pool].size)])
                chosen += taken
                left -= len(taken)
        return chosen

    def way_out(self, shape: Shape) -> float:
        """Bytes/s with which a stage's GPUs can send to other nodes, all together."""
        if not self.cluster.tiers:
            return math.inf
        found = 0.0
        for pool, count in zip(self.pools, shape.counts, strict=True):
            cards = self.cluster.nodes[pool.nodes[0]].cards
            assert cards is not None
            whole, rest = divmod(count, pool.size)
            found += whole * cards.way_out(pool.size, pool.size) + cards.way_out(rest, pool.size)
        return found

    def crossings(self, shape: Shape, alike: int) -> list[bool]:
        """Return which borders between so many stages of one shape lie between nodes, [alike - 1].

        Stages that are parts of a node fill it one after the other.
        """
        size, gpus = self.pools[shape.kinds[0]].size, sum(shape.counts)
        return [gpus >= size or (place + 1) * gpus % size == 0 for place in range(alike - 1)]

    def seconds_between(self, first: Shape, second: Shape, size: float, crossing: float) -> float:
        """Return how long bytes take from one stage to the next, roughly, over all of their links.

        Args:
            first: the sender's shape.
            second: the receiver's.
            size: bytes.
            crossing: how likely the stages are on different nodes, from 0 to 1, where one has room for both.
        """
        gpus, pool = sum(first.counts), self.pools[first.kinds[0]]
        together = gpus + sum(second.counts)
        if first.kinds != second.kinds or len(first.kinds) > 1 or together > pool.size:
            return self._seconds_outside(first, second, size)
        node = self.cluster.nodes[pool.nodes[0]]
        inside = size / (min(gpus, sum(second.counts)) * node.bandwidth) + node.latency_s
        if not crossing:
            return inside
        return (1 - crossing) * inside + crossing * self._seconds_outside(first, second, size)

    def _seconds_outside(self, first: Shape, second: Shape, size: float) -> float:
        """Between stages on different nodes."""
        tiers = self.cluster.tiers
        if not tiers:
            sender, receiver = self.some_gpus(first)[0], self.some_gpus(second)[-1]
            bandwidth = self.cluster.nodes[self.pools[first.kinds[0]].nodes[0]].bandwidth
            return size / (self.cluster.bandwidth(sender, receiver) if sender != receiver else bandwidth)
        one, other = (self.pools[shape.kinds[0]].nodes[0] for shape in (first, second))
        seconds = size / min(self.way_out(first), self.way_out(second)) + tiers[0].latency_s(one, other)
        here, there = ({self.pools[kind].site for kind in shape.kinds} for shape in (first, second))
        if here != there and len(tiers) > 1:
            links = min(self._links_out(first), self._links_out(second))
            seconds = max(seconds, size / (links * tiers[-1].bandwidths[0])) + tiers[-1].latency_s(one, other)
        return seconds

    def _links_out(self, shape: Shape) -> int:
        """Links of the outermost tier that a stage's GPUs have."""
        per = self.cluster.tiers[-1].per
        if per == "gpu":
            return sum(shape.counts)
        sizes = [pool.size for pool in self.pools]
        nodes = (math.ceil(count / size) for count, size in zip(shape.counts, sizes, strict=True))
        return sum(nodes) if per == "node" else 1


def _alike(cluster: Cluster, site_of: dict[int, int]) -> list[Pool]:
    """Nodes by what they are, and by the site of their first GPU."""
    alike: dict[tuple[int, int, float, float, Cards | None, int], list[int]] = {}
    for number, node in enumerate(cluster.nodes):
        name = (id(node.device), len(node.ranks), node.bandwidth, node.latency_s, node.cards)
        alike.setdefault((*name, site_of.get(node.ranks[0], 0)), []).append(number)
    return [
        Pool(cluster.nodes[nodes[0]].device, size, tuple(nodes), site)
        for (_, size, _, _, _, site), nodes in alike.items()
    ]
