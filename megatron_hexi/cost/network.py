"""Seconds of transfers that cross shared links at the same time.

A message takes as long as the busiest link on its route needs for all the bytes of all messages that cross
it, plus the latency of its route. A set of messages takes as long as its longest. Sharing is thus counted as
if all messages were in flight from the first byte to the last; a fair network delivers a set no faster.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from megatron_hexi.cluster import Cluster, LinkId
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.recent import Recent

#: Sets of GPUs whose likeness is kept.
_MOST_SETS = 256


class LinkTable:
    """The links of a cluster as arrays: `Cluster.route` and `Cluster.capacity` for many messages at once.

    Links are numbered from 1 on. Number 0 stands for the absence of a link and is never busy.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.nodes = np.array([rank.node for rank in cluster.ranks])
        self._tiers = [np.array(tier.group_of) for tier in cluster.tiers[1:]]
        self._local_latency = np.array([node.latency_s for node in cluster.nodes])
        #: Seconds that crossing each tier adds, by node, [tiers, nodes].
        self._tier_latency = np.array([tier.latencies_s for tier in cluster.tiers])
        #: Bytes/s of each link, and the number of GPUs that use it, [links].
        self._capacity, self._sharers = np.full(1, math.inf), np.ones(1)
        #: Link and latency of each pair of nodes, [sending node, receiving node], if they are measured.
        self._pairs: Ints | None = None
        self._likeness = Recent[bytes](_MOST_SETS)
        self._pair_latency: Floats | None = None
        gpus, local = np.arange(len(self.nodes)), [cluster.nodes[node].bandwidth for node in self.nodes]
        ends = [self._add(gpus, np.array([local, local]))]
        if cluster.is_measured:
            ends.append(self._add_matrix(cluster))
        for tier in cluster.tiers:
            ends.append(self._add(np.array(tier.link_of), np.array([tier.bandwidths, tier.bandwidths])))
        #: Links out of each GPU and into it: inside its node, of each tier, and none, [2, tiers + 2, GPUs].
        self._ends = np.stack([*ends, 0 * ends[0]], axis=1)
        #: Rows there of the links that a message crosses, by distance: its node's, or each tier's, [P, D].
        far = np.arange(1, max(2, len(ends)))[:, None]
        self._crossed = np.where(far <= np.arange(len(ends)), far, len(ends))
        self._crossed[0, 0] = 0

    def message_seconds(
        self, src: Ints, dst: Ints, size: Floats, sets: Ints | None = None, width: int = 1
    ) -> Floats:
        """Return the seconds of each message, of the shape of `size`.

        Args:
            src: number in the cluster of each message's sending GPU, [M].
            dst: number of the receiving GPU, which is another GPU, [M].
            size: bytes of each message, [M]; or [K, M] for K independent sets between the same GPUs.
            sets: the set of each message, numbered from 0, [M]; only messages of one set share links.
                ``None``: all messages are one set.
            width: tensor-parallel size: number of equal messages that each of these stands for, from
                different GPUs of the same two nodes.
        """
        if not len(src):
            return np.zeros(size.shape)
        distance = self._distance(src, dst)
        places = self._crossed[:, distance]
        links = np.concatenate([self._ends[0, places, src], self._ends[1, places, dst]])
        if self._pairs is not None:
            links = np.concatenate([links, self._pairs[None, self.nodes[src], self.nodes[dst]]])
        # Each pair of a link and a set, in each row of sizes, has a number, by which loads are added up.
        number = links if sets is None else links + sets * len(self._capacity)
        sizes = size.reshape(-1, 1, len(src))
        if len(sizes) > 1:
            number = number + np.arange(len(sizes))[:, None, None] * (1 + int(number.max()))
        number = number.reshape(len(sizes), *links.shape)
        load = np.bincount(number.ravel(), np.broadcast_to(sizes, number.shape).ravel())
        capacity = self._capacity[links] / np.minimum(self._sharers[links], width)
        busy = (load[number] / capacity).max(axis=1)
        return busy.reshape(size.shape) + self._latency(src, dst, distance)

    def latency(self, src: Ints, dst: Ints) -> Floats:
        """Return the seconds of latency of each message; for the arguments see `message_seconds`."""
        return self._latency(src, dst, self._distance(src, dst))

    def set_seconds(self, src: Ints, dst: Ints, size: Floats, width: int = 1) -> float:
        """Return the seconds until all messages of one set have arrived.

        Messages of 0 bytes are not sent. For the arguments see `message_seconds`.
        """
        sent = size > 0
        seconds = self.message_seconds(src[sent], dst[sent], size[sent], width=width)
        return float(seconds.max(initial=0.0))

    def likeness(self, gpus: Ints) -> bytes:
        """Return a key that is equal for GPUs between which messages take equally long.

        Among such GPUs the same ones share nodes, links and parts of each tier; their links are equally fast
        and have as many users, and latencies are equal.

        Args:
            gpus: numbers of the GPUs, in the order of the units that are on them, [U].
        """
        if self._pairs is not None:  # measured between each two nodes
            return gpus.tobytes()
        return self._likeness.of(gpus.tobytes(), partial(self._likeness_of, gpus))

    def _likeness_of(self, gpus: Ints) -> bytes:
        nodes, links = self.nodes[gpus], self._ends[:, :, gpus].ravel()
        numbers = [nodes, links, *(group_of[nodes] for group_of in self._tiers)]
        found = [*map(_by_appearance, numbers), self._capacity[links], self._sharers[links]]
        found.append(self._local_latency[nodes])
        if len(self._tier_latency):
            found.append(self._tier_latency[:, nodes])
        return b"".join(values.tobytes() for values in found)

    def _distance(self, src: Ints, dst: Ints) -> Ints:
        a, b = self.nodes[src], self.nodes[dst]
        distance = (a != b).astype(np.int64)
        for number, group_of in enumerate(self._tiers, start=2):
            distance[group_of[a] != group_of[b]] = number
        return distance

    def _latency(self, src: Ints, dst: Ints, distance: Ints) -> Floats:
        a = self.nodes[src]
        if self._pair_latency is None:
            far = self._far_latency(a, self.nodes[dst], distance)
        else:
            far = self._pair_latency[a, self.nodes[dst]]
        return np.where(distance == 0, self._local_latency[a], far)

    def _far_latency(self, a: Ints, b: Ints, distance: Ints) -> Floats:
        """Return the sum over the tiers between nodes `a` and `b` of the longer of their latencies, s."""
        if not len(self._tier_latency):
            return np.zeros(distance.shape)
        if (self._tier_latency == self._tier_latency[:, :1]).all():
            return np.append(0.0, np.cumsum(self._tier_latency[:, 0]))[distance]
        longer = np.maximum(self._tier_latency[:, a], self._tier_latency[:, b])
        crossed = np.arange(len(longer))[:, None] < distance
        return (longer * crossed).sum(axis=0)

    def _add(self, owners: Ints, capacity: Floats) -> Ints:
        """Add links and return the numbers of each GPU's links out of it and into it, [2, GPUs].

        `capacity` is that of the links, bytes/s, [2, owners]; `owners` tells the owner of each GPU's links.
        """
        first = len(self._capacity) + np.array([[0], [capacity.shape[1]]])
        self._capacity = np.concatenate([self._capacity, capacity.ravel()])
        users = np.bincount(owners, minlength=capacity.shape[1])
        self._sharers = np.concatenate([self._sharers, users, users])
        return first + owners

    def _add_matrix(self, cluster: Cluster) -> Ints:
        """Add the links of measured pairs of nodes, and each node's links out and in; return the latter.

        A message crosses the sending node's link out, the pair's link, and the receiving node's link in.
        """
        count = len(cluster.nodes)
        self._pair_latency = np.zeros((count, count))
        self._pairs = np.zeros((count, count), dtype=np.int64)
        pairs: list[float] = []
        for a, node in enumerate(cluster.nodes):
            for b, other in enumerate(cluster.nodes):
                if a != b:
                    self._pairs[a, b] = len(self._capacity) + len(pairs)
                    pairs.append(cluster.capacity(LinkId(1, "pair", a * count + b, "out")))
                    self._pair_latency[a, b] = cluster.route(node.ranks[0], other.ranks[0]).latency_s
        self._capacity = np.append(self._capacity, pairs)
        self._sharers = np.append(self._sharers, np.full(len(pairs), math.inf))
        ways = [
            [cluster.capacity(LinkId(1, "node", number, way)) for number in range(count)]
            for way in ("out", "in")
        ]
        return self._add(self.nodes, np.array(ways))


def _by_appearance(numbers: Ints) -> Ints:
    """Return numbers renamed in the order in which they first appear, from 0 on."""
    _, first, place = np.unique(numbers, return_index=True, return_inverse=True)
    names = np.empty_like(first)
    names[np.argsort(first)] = np.arange(len(first))
    renamed: Ints = names[place]
    return renamed
