"""Pools of equal nodes, and the shapes of stages: numbers of GPUs from each pool.

Here a stage's GPUs are only numbers from each pool; `placing` chooses the GPUs.
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
#: With more pools, sites are not distinguished, since partitions of the pools are enumerated.
_MOST_POOLS = 8


@dataclass(frozen=True, eq=False)
class Pool:
    """Equal nodes on one site.

    Args:
        site: number of the part of the outermost network level that they are in.
    """

    device: Device
    size: int
    nodes: tuple[int, ...]
    site: int

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.size * len(self.nodes)


class StageShape(NamedTuple):
    """The GPUs of a stage, by number from each pool.

    Args:
        width: number of GPUs of a tensor-parallel unit.
    """

    counts: Counts
    width: int

    @property
    def units(self) -> int:
        """Number of tensor-parallel units."""
        return sum(self.counts) // self.width

    @property
    def kinds(self) -> list[int]:
        """Pools with at least one GPU in the stage."""
        return pools_of(self.counts)


def pools_of(counts: Counts) -> list[int]:
    """Return the pools with at least one GPU."""
    return [pool for pool, count in enumerate(counts) if count]


def is_exact(shape: StageShape) -> bool:
    """Whether searches time a stage as it is: on one pool, or on one unit of each of several pools."""
    return len(shape.kinds) in (1, shape.units)


class Pools:
    """The pools of a cluster.

    Args:
        pools: its pools, the fastest GPUs first.
    """

    def __init__(self, cluster: Cluster, pools: Sequence[Pool]) -> None:
        self.cluster, self.pools = cluster, tuple(pools)

    @classmethod
    def of(cls, cluster: Cluster, speeds: Sequence[float]) -> Pools:
        """Return the pools of a cluster.

        Args:
            speeds: tokens/s of the job on one GPU of each node at its best rates.
        """
        levels = cluster.fast_domains()
        # The last partition is everything, unless there is no level above the node.
        sites = levels[-2].parts if len(levels) > 2 else ()
        pools = _alike(cluster, {gpu: number for number, part in enumerate(sites) for gpu in part})
        pools = pools if len(pools) <= _MOST_POOLS else _alike(cluster, {})
        pools.sort(key=lambda pool: (-speeds[pool.nodes[0]], pool.device.name, -pool.gpus, pool.nodes[0]))
        return cls(cluster, pools)

    @cached_property
    def totals(self) -> Counts:
        """Number of GPUs of each pool."""
        return tuple(pool.gpus for pool in self.pools)

    @cached_property
    def usable_gib(self) -> tuple[float, ...]:
        """Memory of a GPU of each pool that plans may use, GiB."""
        return tuple(pool.device.usable_gib for pool in self.pools)

    def part(self, copies: int) -> Pools:
        """Return the pools of the first of `copies` equal parts of the nodes."""
        parts = (replace(pool, nodes=pool.nodes[: len(pool.nodes) // copies]) for pool in self.pools)
        return Pools(self.cluster, list(parts))

    def with_memory(self, times: float) -> Pools:
        """Return the pools with GPUs of `times` times the memory."""
        cluster = self.cluster.with_memory_margin(1 - times)
        pools = (replace(pool, device=cluster.nodes[pool.nodes[0]].device) for pool in self.pools)
        return Pools(cluster, list(pools))

    def aligned(self, pool: int, count: int) -> bool:
        """Return whether stages with this many of a pool's GPUs are whole nodes, or equal parts of a node."""
        size = self.pools[pool].size
        return count % size == 0 or (count < size and size % count == 0)

    def node_gpus(self, pool: int, width: int) -> int:
        """Return how many GPUs of each of a pool's nodes units of `width` use; the others stay idle.

        Units lie inside nodes: of a node with 7 GPUs, units of 2 use 6.
        """
        size = self.pools[pool].size
        return size - size % width

    def tiles(self, pool: int, count: int, width: int) -> bool:
        """Return whether stages with this many of a pool's GPUs, in units of `width`, fill nodes together."""
        size = self.node_gpus(pool, width)
        return count % size == 0 or size % (count % size) == 0

    def rounded(self, pool: int, count: int, width: int) -> int:
        """Return the most GPUs of a pool, up to `count`, that form stages of whole units."""
        size = self.node_gpus(pool, width)
        if not size:
            return 0
        if count >= size:
            return min(count // size, len(self.pools[pool].nodes)) * size
        return max((part for part in range(width, count + 1, width) if size % part == 0), default=0)

    def some_gpus(self, shape: StageShape) -> list[int]:
        """Return GPUs of the cluster that match a shape: the first of each pool."""
        chosen = []
        for pool in shape.kinds:
            left, size = shape.counts[pool], self.node_gpus(pool, shape.width)
            for node in self.pools[pool].nodes:
                taken = list(self.cluster.nodes[node].ranks[: min(left, size)])
                chosen += taken
                left -= len(taken)
        return chosen

    def way_out(self, shape: StageShape) -> float:
        """Return the bytes/s that a stage's GPUs together can send to other nodes."""
        if not self.cluster.tiers:
            return math.inf
        bandwidth = 0.0
        for number in shape.kinds:
            pool, used = self.pools[number], self.node_gpus(number, shape.width)
            cards = self.cluster.nodes[pool.nodes[0]].cards
            assert cards is not None
            whole, rest = divmod(shape.counts[number], used)
            bandwidth += whole * cards.way_out(used, pool.size) + cards.way_out(rest, pool.size)
        return bandwidth

    def crossings(self, shape: StageShape, alike: int) -> list[bool]:
        """Return whether each border between `alike` stages of one shape lies between nodes, [alike - 1].

        Stages that are parts of a node fill it one after the other.
        """
        size, gpus = self.node_gpus(shape.kinds[0], shape.width), sum(shape.counts)
        return [gpus >= size or (place + 1) * gpus % size == 0 for place in range(alike - 1)]

    def seconds_between(self, first: StageShape, second: StageShape, size: float, crossing: float) -> float:
        """Return the estimated seconds for bytes from one stage to the next, over all of their links.

        Args:
            crossing: probability that the stages are on different nodes, if one node has room for both.
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

    def _seconds_outside(self, first: StageShape, second: StageShape, size: float) -> float:
        """Return the seconds in which `size` bytes get to a stage on other nodes; see `seconds_between`."""
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

    def _links_out(self, shape: StageShape) -> int:
        """Return the number of links of the outermost tier that a stage's GPUs have."""
        per = self.cluster.tiers[-1].per
        if per == "gpu":
            return sum(shape.counts)
        nodes = (math.ceil(shape.counts[pool] / self.node_gpus(pool, shape.width)) for pool in shape.kinds)
        return sum(nodes) if per == "node" else 1


def _alike(cluster: Cluster, site_of: dict[int, int]) -> list[Pool]:
    """Return the pools of a cluster, given the site of each GPU."""
    alike: dict[tuple[int, int, float, float, Cards | None, int], list[int]] = {}
    for number, node in enumerate(cluster.nodes):
        name = (id(node.device), len(node.ranks), node.bandwidth, node.latency_s, node.cards)
        alike.setdefault((*name, site_of.get(node.ranks[0], 0)), []).append(number)
    return [
        Pool(cluster.nodes[nodes[0]].device, size, tuple(nodes), site)
        for (_, size, _, _, _, site), nodes in alike.items()
    ]
