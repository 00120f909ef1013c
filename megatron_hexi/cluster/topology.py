"""The topology of a cluster: numbered ranks, and the links that each transfer occupies.

A link is a shared resource for one direction. For the cost model, transfers take the largest bytes / capacity
over all links; the simulator divides each link fairly among the transfers that use it. Tier 0 is inside the
node, tier 1 between nodes, and higher tiers are the cluster file's fabrics and levels:

    rank -> [its port]                              -> rank of the same node
    rank -> [out of tier 1] -> … -> [into tier 1]   -> rank of another node

A route climbs only to the first tier at which the two ranks are in the same group. With a measured matrix a
route uses the link out of the sending node, the link of the measured pair of nodes, and the link into the
receiving node; the link out of (into) a node has the bandwidth of the node's fastest pair in that direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_hexi.cluster.device import Device, Host
from megatron_hexi.cluster.links import (
    GB,
    MICRO,
    Cards,
    LinkId,
    Node,
    Rank,
    Route,
    Tier,
    Way,
    find_tiers,
    gb_s,
)
from megatron_hexi.cluster.model import ClusterFile, Matrix, NodeHost, NodeNetwork

#: Measured bandwidth (bytes/s) and latency (s) of each pair of nodes, sender and receiver.
_Pairs = dict[tuple[int, int], tuple[float, float]]


@dataclass(frozen=True)
class Partition:
    """A partition of the ranks into parts; `name` is the level whose links join the ranks of each part."""

    name: str
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, name: str, group_of: Sequence[int], members: Sequence[Sequence[int]]) -> Partition:
        """Return the partition that joins members, each a list of ranks, of the same group into one part."""
        parts: dict[int, list[int]] = {}
        for number, group in enumerate(group_of):
            parts.setdefault(group, []).extend(members[number])
        return cls(name, tuple(tuple(part) for part in parts.values()))


def matrix_partitions(nodes: int, gb_s: Mapping[tuple[int, int], float]) -> list[tuple[str, list[int]]]:
    """Return nested partitions of nodes by measured bandwidth, the fastest first.

    The nodes of a part reach each other at 2^k GB/s or more. Thresholds are powers of two so that noise of
    the measurement does not split equal nodes. A threshold that joins no further nodes is left out.

    Args:
        gb_s: bandwidth from node to node, GB/s; the slower of the two directions counts.

    Returns:
        For each partition its name, and the number of each node's part.
    """
    octave = {(a, b): math.floor(math.log2(min(gb_s[a, b], gb_s[b, a]))) for a, b in gb_s if a < b}
    group_of = list(range(nodes))
    groups = {node: [node] for node in range(nodes)}
    steps = []
    for power in sorted(set(octave.values()), reverse=True):
        before = len(groups)
        for (a, b), pair_power in octave.items():
            if pair_power == power and group_of[a] != group_of[b]:
                keep, drop = sorted((group_of[a], group_of[b]))
                moved = groups.pop(drop)
                groups[keep] += moved
                for node in moved:
                    group_of[node] = keep
        if len(groups) < before:
            steps.append((f"{2.0**power:g} GB/s", group_of.copy()))
    return steps


@dataclass(frozen=True)
class Cluster:
    """The nodes, ranks and links of a cluster, as `read_cluster` returns them.

    Args:
        nodes: nodes in file order.
        ranks: ranks in file order, the GPUs of a node together.
        tiers: tiers of links between nodes, from the inside out; empty with a measured matrix or a single
            node.
    """

    file: ClusterFile
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]
    tiers: tuple[Tier, ...]
    _ends: dict[tuple[int, int, Way], tuple[LinkId, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _pairs: _Pairs = field(default_factory=dict, repr=False, compare=False)
    _ways: dict[tuple[int, Way], float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return self.file.name

    @property
    def is_measured(self) -> bool:
        """Whether the cluster describes the links between nodes by a measured matrix instead of tiers."""
        return bool(self._pairs)

    def at_speeds(self, factors: Mapping[int, float]) -> Cluster:
        """Return this cluster with the rates of some ranks multiplied by factors.

        Ranks with equal rates share a `Device`; the device of a node is the device of its first rank.
        """
        devices: dict[tuple[int, float], Device] = {}
        ranks = []
        for rank in self.ranks:
            key = id(rank.device), factors.get(rank.rank, 1.0)
            device = devices.setdefault(key, rank.device.at_speed(key[1]))
            ranks.append(replace(rank, device=device))
        nodes = tuple(replace(node, device=ranks[node.ranks[0]].device) for node in self.nodes)
        return replace(self, nodes=nodes, ranks=tuple(ranks))

    def at_bandwidths(self, factors: Mapping[tuple[int, int], float]) -> Cluster:
        """Return this cluster with the bandwidths of some links multiplied by factors, in both directions.

        Args:
            factors: factors by number of the tier and number of the node, or of the group in a level whose
                groups own the links. Tier 0 is the links between the GPUs of a node.
        """
        nodes = tuple(
            replace(node, bandwidth=node.bandwidth * factors.get((0, number), 1.0))
            for number, node in enumerate(self.nodes)
        )
        node_of = [rank.node for rank in self.ranks]
        tiers = tuple(
            tier.at_bandwidths(
                {owner: by for (level, owner), by in factors.items() if level == number}, node_of
            )
            for number, tier in enumerate(self.tiers, start=1)
        )
        pairs = {
            (a, b): (width * factors.get((1, a), 1.0) * factors.get((1, b), 1.0), latency)
            for (a, b), (width, latency) in self._pairs.items()
        }
        return replace(self, nodes=nodes, tiers=tiers, _pairs=pairs, _ways=_ways(pairs))

    def without(self, lost: Collection[int]) -> Cluster:
        """Return this cluster without some nodes; the remaining nodes are renumbered in the same order.

        Args:
            lost: numbers of the nodes to leave out; at least one node must remain.
        """
        kept = [number for number in range(len(self.nodes)) if number not in lost]
        place = {number: new for new, number in enumerate(kept)}
        nodes, ranks = _number_anew((self.nodes[number], self._devices(number)) for number in kept)
        remaining = [rank.rank for rank in self.ranks if rank.node in place]
        tiers = tuple(tier.of(remaining, place) for tier in self.tiers) if len(kept) > 1 else ()
        pairs = {
            (place[a], place[b]): value for (a, b), value in self._pairs.items() if a in place and b in place
        }
        file = self.file if len(kept) > 1 else replace(self.file, matrix=None)
        return Cluster(file, nodes, ranks, tiers, _pairs=pairs, _ways=_ways(pairs))

    def distance(self, src: int, dst: int) -> int:
        """Return the highest tier that a transfer between two ranks uses; 0 inside a node."""
        a, b = self.ranks[src].node, self.ranks[dst].node
        if a == b:
            return 0
        # Groups are nested: those of a tier differ wherever those of a tier outside it do.
        return max(1, sum(tier.group_of[a] != tier.group_of[b] for tier in self.tiers))

    def route(self, src: int, dst: int) -> Route:
        """Return the links and the latency of a transfer between two ranks; no links if they are the same."""
        if src == dst:
            return Route((), 0.0)
        a, b = self.ranks[src].node, self.ranks[dst].node
        if a == b:
            links = (LinkId(0, "gpu", src, "out"), LinkId(0, "gpu", dst, "in"))
            return Route(links, self.nodes[a].latency_s)
        if self._pairs:
            pair = LinkId(1, "pair", a * len(self.nodes) + b, "out")
            ends = LinkId(1, "node", a, "out"), LinkId(1, "node", b, "in")
            return Route((ends[0], pair, ends[1]), self._pairs[a, b][1])
        far = self.distance(src, dst)
        latency = sum(tier.latency_s(a, b) for tier in self.tiers[:far])
        return Route(self._end(src, far, "out") + self._end(dst, far, "in"), latency)

    def capacity(self, link: LinkId) -> float:
        """Return the bandwidth of a link, bytes/s."""
        if link.tier == 0:
            return self.nodes[self.ranks[link.owner].node].bandwidth
        if not self._pairs:
            return self.tiers[link.tier - 1].bandwidths[link.owner]
        if link.per == "pair":
            return self._pairs[divmod(link.owner, len(self.nodes))][0]
        return self._ways[link.owner, link.way]

    def sharers(self, link: LinkId) -> int:
        """Return the number of GPUs that send or receive over a link."""
        if link.tier == 0:
            return 1
        if link.per == "pair" or not self.tiers:
            return len(self.ranks)
        return self.tiers[link.tier - 1].sharers[link.owner]

    def bandwidth(self, src: int, dst: int) -> float:
        """Return the bandwidth from one rank to another while no other rank sends, bytes/s."""
        return min((self.capacity(link) for link in self.route(src, dst).links), default=float("inf"))

    def link_name(self, link: LinkId) -> str:
        """Return a link's name for reports: ``h100-0/3 port out``, ``a100-1 network in``, ``rack 2 out``."""
        if link.per == "pair":
            a, b = divmod(link.owner, len(self.nodes))
            return f"{self.nodes[a].name} to {self.nodes[b].name}"
        tier = "port" if link.tier == 0 else self.tiers[link.tier - 1].name if self.tiers else "network"
        if link.per == "group":
            return f"{tier} {link.owner} {link.way}"
        return f"{self._owner_name(link)} {tier} {link.way}"

    def with_memory_margin(self, margin: float) -> Cluster:
        """Return this cluster with a share of every GPU's usable memory kept free.

        Args:
            margin: share of memory to keep free, from 0 to 1.
        """
        if margin == 0:
            return self
        return self.with_devices(lambda one: replace(one, usable_gib=one.usable_gib * (1 - margin)))

    def with_devices(self, change: Callable[[Device], Device]) -> Cluster:
        """Return this cluster with each model of GPU changed."""
        # One object a device: devices are told apart by identity.
        devices = [*(node.device for node in self.nodes), *(rank.device for rank in self.ranks)]
        changed = {id(one): change(one) for one in {id(one): one for one in devices}.values()}
        return replace(
            self,
            nodes=tuple(replace(node, device=changed[id(node.device)]) for node in self.nodes),
            ranks=tuple(replace(rank, device=changed[id(rank.device)]) for rank in self.ranks),
        )

    def with_nodes(self, name: str, count: int) -> Cluster:
        """Return this cluster, which must have no levels and no matrix, with `count` nodes in an entry."""
        assert not self.file.levels
        assert not self.file.matrix
        entries = tuple(
            replace(entry, count=count, hosts=None) if entry.name == name else entry
            for entry in self.file.nodes
        )
        file = replace(self.file, nodes=entries)
        likes = (numbers[0] for numbers in self.file.node_numbers.values())
        nodes, ranks = _number_anew(
            (replace(self.nodes[like], name=f"{entry.name}-{copy}"), self._devices(like))
            for entry, like in zip(entries, likes, strict=True)
            for copy in range(entry.count)
        )
        return Cluster(file, nodes, ranks, find_tiers(file, nodes, ranks))

    def over_meeting_cards(self) -> Cluster:
        """Return this cluster with `ClusterFile.over_meeting_cards`: all traffic over where fabrics meet."""
        file = self.file.over_meeting_cards()
        pairs = zip(file.networks, file.nodes, strict=True)
        cards = [_cards(network, entry.gpus) for network, entry in pairs for _ in range(entry.count)]
        nodes = tuple(replace(node, cards=own) for node, own in zip(self.nodes, cards, strict=True))
        return Cluster(file, nodes, self.ranks, find_tiers(file, nodes, self.ranks))

    def _devices(self, node: int) -> list[Device]:
        return [self.ranks[rank].device for rank in self.nodes[node].ranks]

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for reports, such as ``h100-0/3``."""
        return f"{self.nodes[self.ranks[rank].node].name}/{self.ranks[rank].local}"

    def fast_domains(self) -> tuple[Partition, ...]:
        """Return nested partitions of the ranks, from the inside out: by node, by group of each level, all.

        With a measured matrix, parts between node and cluster are nodes that reach each other at 2^k GB/s.
        """
        nodes = [list(node.ranks) for node in self.nodes]
        steps = [("node", list(range(len(nodes))))]
        if self._pairs:
            steps += matrix_partitions(
                len(nodes), {pair: rate / GB for pair, (rate, _) in self._pairs.items()}
            )
        steps += [(tier.name, list(tier.group_of)) for tier in self.tiers[1:]]
        if len(set(steps[-1][1])) > 1:
            steps.append(("cluster", [0] * len(nodes)))
        return tuple(Partition.of(name, group_of, nodes) for name, group_of in steps)

    def _end(self, rank: int, far: int, way: Way) -> tuple[LinkId, ...]:
        key = rank, far, way
        if key not in self._ends:
            tiers = enumerate(self.tiers[:far], start=1)
            links = [LinkId(number, tier.per, tier.link_of[rank], way) for number, tier in tiers]
            self._ends[key] = tuple(links if way == "out" else reversed(links))
        return self._ends[key]

    def _owner_name(self, link: LinkId) -> str:
        if link.per != "card":
            return self.rank_name(link.owner) if link.per == "gpu" else self.nodes[link.owner].name
        tier = self.tiers[link.tier - 1]
        first = tier.first_ranks[link.owner]
        last = first + tier.sharers[link.owner] - 1
        node = self.nodes[self.ranks[first].node]
        if len(node.ranks) == tier.sharers[link.owner]:
            return node.name
        return self.rank_name(first) + (f"-{self.ranks[last].local}" if last > first else "")


def build_cluster(file: ClusterFile, devices: Mapping[str, Device]) -> Cluster:
    """Build the cluster that a checked cluster file describes."""
    nodes_devices: list[tuple[Node, Sequence[Device]]] = []
    for number, entry in enumerate(file.nodes):
        device = devices[entry.gpu].at_speed(entry.speed)
        if entry.memory_gb is not None:
            device = device.with_memory(entry.memory_gb)
        if entry.host is not None:
            device = replace(device, host=_host(entry.host, device.host, entry.gpus))
        intra = entry.intra or device.link
        bandwidth = intra.bandwidth_gb_s * GB
        latency_s = (device.link.latency_us if intra.latency_us is None else intra.latency_us) / MICRO
        cards = _cards(file.networks[number], entry.gpus) if file.networks else None
        parts = {} if entry.intra else device.link.unit_parts
        for copy in range(entry.count):
            node = Node(f"{entry.name}-{copy}", device, range(entry.gpus), bandwidth, latency_s, cards, parts)
            nodes_devices.append((node, [device] * entry.gpus))
    nodes, ranks = _number_anew(nodes_devices)
    pairs = _pairs(file, file.matrix) if file.matrix else {}
    return Cluster(file, nodes, ranks, find_tiers(file, nodes, ranks), _pairs=pairs, _ways=_ways(pairs))


def _cards(network: NodeNetwork, gpus: int) -> Cards:
    """Return the cards of a node with `gpus` GPUs; several cards of one GPU are combined into one."""
    count = min(network.cards, gpus)
    each = gb_s(network) * GB * network.cards / count
    return Cards(count, each, network.latency_us / MICRO, network.fabric)


def _host(node_host: NodeHost, device_host: Host | None, gpus: int) -> Host:
    """Return each GPU's share of a node's host memory; the checks ensure that all figures are known."""
    values = {name: value for name, value in vars(node_host).items() if value is not None}
    if "usable_gib" in values:
        values["usable_gib"] /= gpus
    device_host = device_host or Host(0.0, 0.0, 0.0)
    estimate = device_host.estimate if len(values) < len(vars(node_host)) else None
    return replace(device_host, **values, source="the cluster file", estimate=estimate)


def _number_anew(nodes: Iterable[tuple[Node, Sequence[Device]]]) -> tuple[tuple[Node, ...], tuple[Rank, ...]]:
    """Number nodes, each given with the devices of its GPUs, in order; return the nodes and all ranks."""
    numbered: list[Node] = []
    ranks: list[Rank] = []
    for node, devices in nodes:
        first = len(ranks)
        ranks += (Rank(first + local, len(numbered), local, device) for local, device in enumerate(devices))
        numbered.append(replace(node, ranks=range(first, len(ranks))))
    return tuple(numbered), tuple(ranks)


def _pairs(file: ClusterFile, matrix: Matrix) -> _Pairs:
    """Return the bandwidth and latency of each pair of nodes, by node numbers in the file."""
    numbers = [number for text in matrix.nodes for number in file.find_nodes(text) or ()]
    return {
        (a, b): ((matrix.bandwidth_gb_s[r][c] or 0) * GB, (matrix.latency_us[r][c] or 0) / MICRO)
        for r, a in enumerate(numbers)
        for c, b in enumerate(numbers)
        if r != c
    }


def _ways(pairs: _Pairs) -> dict[tuple[int, Way], float]:
    """Return the bandwidth out of and into each node, bytes/s: the largest in the node's row and column."""
    best: dict[tuple[int, Way], float] = {}
    for (a, b), (bandwidth, _) in pairs.items():
        best[a, "out"] = max(bandwidth, best.get((a, "out"), 0))
        best[b, "in"] = max(bandwidth, best.get((b, "in"), 0))
    return best
