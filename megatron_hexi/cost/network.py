"""How long transfers take that cross shared links at the same time.

A message takes as long as the busiest link on its route needs for all the bytes that cross it, its own and
others', plus the latency of its route. A set of messages takes as long as its longest. Sharing is thus
counted as if all were under way from the first byte to the last, which a fair network does not beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster, LinkId
from megatron_hexi.cost.arrays import Floats, Ints


@dataclass(frozen=True, eq=False)
class _LinkClass:
    """Links of one kind and direction.

    Args:
        distance: a message crosses one of them if its nodes are at least this far apart (0: exactly).
        owner: the link's number, from the sending and the receiving GPU.
        capacity: of each, bytes/s.
        per_gpu: whether each GPU has its own.
    """

    distance: int
    owner: Callable[[Ints, Ints], Ints]
    capacity: Floats
    per_gpu: bool


class LinkTable:
    """The links of a cluster as arrays: `Cluster.route` and `Cluster.capacity` for many messages at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.nodes = np.array([rank.node for rank in cluster.ranks])
        self._tiers = [np.array(tier.group_of) for tier in cluster.tiers[1:]]
        local = np.array([cluster.nodes[node].bandwidth for node in self.nodes])
        self._classes = [
            _LinkClass(0, lambda src, dst: src, local, True),
            _LinkClass(0, lambda src, dst: dst, local, True),
        ]
        latencies = [node.latency_s for node in cluster.nodes]
        self._local_latency = np.array(latencies)
        self._far_latency: Floats = np.cumsum([0.0, *(tier.latency_s for tier in cluster.tiers)])
        self._pair_latency: Floats | None = None
        if cluster.is_measured:
            self._add_matrix(cluster)
        for number, tier in enumerate(cluster.tiers, start=1):
            group_of = np.array(tier.group_of)[self.nodes]
            owners = {"gpu": np.arange(len(self.nodes)), "node": self.nodes}.get(tier.per, group_of)
            capacity = np.full(int(owners.max()) + 1, tier.bandwidth)
            for number_of, factor in tier.factors.items():
                held = self.nodes == number_of if tier.per != "group" else group_of == number_of
                capacity[owners[held]] *= factor  # an owner that several ranks share is scaled once
            for way in ("out", "in"):
                self._classes.append(_LinkClass(number, _owner(owners, way), capacity, tier.per == "gpu"))
        self._by_distance: dict[int, list[_LinkClass]] = {}
        for links in self._classes:
            self._by_distance.setdefault(links.distance, []).append(links)

    def message_seconds(
        self,
        src: Ints,
        dst: Ints,
        size: Floats,
        sets: Ints | None = None,
        width: int = 1,
    ) -> Floats:
        """Seconds of each message.

        Args:
            src: sending GPU of each message, as the cluster's rank.
            dst: receiving GPU, another one.
            size: bytes, [M]; or [K, M]: of K sets of messages between the same ends.
            sets: the set of each message, numbered from 0; only those of one set are under way together.
                ``None``: all are.
            width: the counterparts of a tensor-parallel unit that send the same beside each, from GPUs of
                the same two nodes.
        """
        if not len(src):
            return np.zeros(size.shape)
        distance = self._distance(src, dst)
        batch = np.zeros(len(src), dtype=np.int64) if sets is None else sets
        batches = 1 + int(batch.max())
        seconds = np.zeros(size.shape)
        for least, classes in self._by_distance.items():
            crossing = np.flatnonzero(distance == 0 if least == 0 else distance >= least)
            if not len(crossing):
                continue
            ends, one = (src[crossing], dst[crossing]), batch[crossing]
            for links in classes:
                count = len(links.capacity)
                key = one * count + links.owner(*ends)
                for sizes, times in zip(np.atleast_2d(size), np.atleast_2d(seconds), strict=True):
                    load = np.bincount(key, weights=sizes[crossing], minlength=batches * count)
                    if not links.per_gpu:
                        load *= width
                    busy = (load.reshape(batches, count) / links.capacity).ravel()[key]
                    times[crossing] = np.maximum(times[crossing], busy)
        return seconds + self._latency(src, dst, distance)

    def set_seconds(self, src: Ints, dst: Ints, size: Floats, width: int = 1) -> float:
        """Seconds until all of one set of messages have arrived; messages without bytes are not sent."""
        sent = size > 0
        seconds = self.message_seconds(src[sent], dst[sent], size[sent], width=width)
        return float(seconds.max(initial=0.0))

    def _distance(self, src: Ints, dst: Ints) -> Ints:
        a, b = self.nodes[src], self.nodes[dst]
        distance = (a != b).astype(np.int64)
        for number, group_of in enumerate(self._tiers, start=2):
            distance[group_of[a] != group_of[b]] = number
        return distance

    def _latency(self, src: Ints, dst: Ints, distance: Ints) -> Floats:
        a = self.nodes[src]
        if self._pair_latency is None:
            far = self._far_latency[distance]
        else:
            far = self._pair_latency[a, self.nodes[dst]]
        return np.where(distance == 0, self._local_latency[a], far)

    def _add_matrix(self, cluster: Cluster) -> None:
        """Sender's way out, the measured pair, receiver's way in."""
        count = len(cluster.nodes)
        pairs = np.full(count * count, math.inf)
        self._pair_latency = np.zeros((count, count))
        for a, node in enumerate(cluster.nodes):
            for b, other in enumerate(cluster.nodes):
                if a != b:
                    pairs[a * count + b] = cluster.capacity(LinkId(1, "pair", a * count + b, "out"))
                    latency = cluster.route(node.ranks[0], other.ranks[0]).latency_s
                    self._pair_latency[a, b] = latency
        out, into = (
            np.array([cluster.capacity(LinkId(1, "node", n, way)) for n in range(count)])
            for way in ("out", "in")
        )
        nodes = self.nodes
        self._classes += [
            _LinkClass(1, _owner(nodes, "out"), out, False),
            _LinkClass(1, lambda src, dst: nodes[src] * count + nodes[dst], pairs, False),
            _LinkClass(1, _owner(nodes, "in"), into, False),
        ]


def _owner(owners: Ints, way: str) -> Callable[[Ints, Ints], Ints]:
    """The owner of the sending GPU's link out, or of the receiving GPU's link in."""
    if way == "out":
        return lambda src, dst: owners[src]
    return lambda src, dst: owners[dst]
