"""Nodes, ranks, network cards, links, and the tiers of links between nodes, fabrics and groups of levels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_hexi.cluster.device import Device
from megatron_hexi.cluster.model import GB_OF_GBIT, ClusterFile, FabricLink, NetworkLevel, NodeNetwork

Per = Literal["gpu", "card", "node", "group", "pair"]
Way = Literal["out", "in"]
#: Entries of the cluster file with the rate of cards or links, nominal or measured.
Rated = NodeNetwork | FabricLink | NetworkLevel


class LinkId(NamedTuple):
    """Identity of one direction of a link: out of, or into, a rank, card, node, group or pair of nodes.

    Args:
        tier: number of the tier: 0 inside a node, 1 between nodes, 2 and up for fabrics and levels of the
            cluster file.
        owner: number of the rank, card, node or group (of the level) that owns the link; sending node x
            number of nodes + receiving node for a pair.
    """

    tier: int
    per: Per
    owner: int
    way: Way


@dataclass(frozen=True)
class Route:
    """The route of a transfer: the links that the transfer occupies, in order, and its latency in seconds."""

    links: tuple[LinkId, ...]
    latency_s: float


@dataclass(frozen=True)
class Cards:
    """The network cards of a node.

    Args:
        bandwidth: bandwidth of each card, bytes/s per direction.
        latency_s: latency between two nodes, s.
        fabric: name of the network to which the cards are connected.
    """

    count: int
    bandwidth: float
    latency_s: float
    fabric: str

    def card_of(self, gpu: int, gpus: int) -> int:
        """Return the number of the card that a GPU of the node uses."""
        return gpu * self.count // gpus

    def way_out(self, used: int, gpus: int) -> float:
        """Return the bandwidth from the first `used` of a node's `gpus` GPUs to other nodes, bytes/s."""
        return self.bandwidth * (1 + self.card_of(used - 1, gpus)) if used else 0.0


@dataclass(frozen=True)
class Node:
    """A node of the cluster: name, GPU model, ranks, links between its GPUs, and network cards.

    Each GPU's link inside the node has a bandwidth (bytes/s per direction), of which units may take a part
    (`Link.unit_parts`), and a latency (s). The cards are ``None`` if unknown: in a cluster with a measured
    matrix, or with a single node.
    """

    name: str
    device: Device
    ranks: range
    bandwidth: float
    latency_s: float
    cards: Cards | None = None
    unit_parts: Mapping[int, float] = field(default_factory=dict, hash=False)

    def unit_bandwidth(self, width: int) -> float:
        """Return the bandwidth of a GPU to the others of its unit of `width` GPUs, bytes/s."""
        return self.bandwidth * self.unit_parts.get(width, 1.0)


@dataclass(frozen=True)
class Rank:
    """A GPU of the cluster: number in the job, number of the node, number inside the node, and device."""

    rank: int
    node: int
    local: int
    device: Device


@dataclass(frozen=True)
class Tier:
    """A tier of links: the links between nodes, between fabrics, or between the groups of a level.

    Args:
        per: kind of owner of each link.
        link_of: number of the link of each rank: the number of the rank, of its node, of its group, or of a
            card counted over the cluster.
        bandwidths: bandwidth of each link, bytes/s per direction.
        latencies_s: latency that a transfer gets by crossing the tier, for each node, s; of the two nodes of
            a transfer the longer latency counts.
        group_of: number of the group of each node; in the tier between nodes, each node is a group.
    """

    name: str
    per: Per
    link_of: tuple[int, ...]
    bandwidths: tuple[float, ...]
    latencies_s: tuple[float, ...]
    group_of: tuple[int, ...]

    @cached_property
    def sharers(self) -> tuple[int, ...]:
        """Number of ranks that share each link."""
        counts = Counter(self.link_of)
        return tuple(counts[link] for link in range(len(self.bandwidths)))

    @cached_property
    def first_ranks(self) -> Mapping[int, int]:
        """The first rank that uses each link, by number of the link."""
        return {link: rank for rank, link in reversed(list(enumerate(self.link_of)))}

    def latency_s(self, a: int, b: int) -> float:
        """Return the latency that this tier adds to a transfer between two nodes, s."""
        return max(self.latencies_s[a], self.latencies_s[b])

    def at_bandwidths(self, factors: Mapping[int, float], node_of: Sequence[int]) -> Tier:
        """Return this tier with the bandwidths of its links multiplied by factors.

        Args:
            factors: factors by number of the group if each group owns a link, otherwise by number of the
                node.
        """
        number_of = [self.group_of[node] for node in node_of] if self.per == "group" else node_of
        factor_of = {link: factors.get(number_of[rank], 1.0) for link, rank in self.first_ranks.items()}
        widths = (width * factor_of.get(link, 1.0) for link, width in enumerate(self.bandwidths))
        return replace(self, bandwidths=tuple(widths))

    def of(self, ranks: Sequence[int], place: Mapping[int, int]) -> Tier:
        """Return this tier for a part of the cluster, with nodes and ranks renumbered and groups unchanged.

        Args:
            ranks: the ranks that remain, all ranks of some nodes.
            place: new number of each remaining node, by old number, ascending.
        """
        links = [self.link_of[rank] for rank in ranks]
        latencies = tuple(self.latencies_s[node] for node in place)
        group_of = tuple(self.group_of[node] for node in place)
        if self.per == "group":
            return replace(self, link_of=tuple(links), latencies_s=latencies, group_of=group_of)
        if self.group_of == tuple(range(len(self.group_of))):  # each node is a group
            group_of = tuple(place.values())
        new = {link: number for number, link in enumerate(dict.fromkeys(links))}
        return replace(
            self,
            link_of=tuple(new[link] for link in links),
            bandwidths=tuple(self.bandwidths[link] for link in new),
            latencies_s=latencies,
            group_of=group_of,
        )


GB = 1e9
MICRO = 1e6


def find_tiers(file: ClusterFile, nodes: Sequence[Node], ranks: Sequence[Rank]) -> tuple[Tier, ...]:
    """Return the tiers of links, from the inside out, of a cluster file without a matrix.

    A file without a network has no tiers.
    """
    if not file.networks:
        return ()
    tiers = [_network(file, nodes, ranks)]
    for number, (link, group_of) in enumerate(zip(file.fabrics, fabric_groups(file), strict=False)):
        per: Per = "group" if link.per == "fabric" else link.per
        name = "fabrics" if number == 0 else f"fabrics-{number + 1}"
        tiers.append(_tier(name, per, gb_s(link) * GB, link.latency_us, group_of, ranks))
    for level in file.levels:
        groups = [0] * file.node_count
        for group, texts in enumerate(level.groups):
            for number in (n for text in texts for n in file.find_nodes(text) or ()):
                groups[number] = group
        tiers.append(_tier(level.name, level.per, gb_s(level) * GB, level.latency_us, groups, ranks))
    return tuple(tiers)


def fabric_groups(file: ClusterFile) -> list[list[int]]:
    """Return partitions of the nodes by fabric: before the file's `fabrics` entries, and after each of them.

    A partition has the number of each node's group of joined fabrics.
    """
    each = zip(file.nodes, file.networks, strict=True)
    names = [network.fabric for entry, network in each for _ in range(entry.count)]
    group_of = {name: number for number, name in enumerate(file.fabric_names)}
    partitions = [[group_of[name] for name in names]]
    for link in file.fabrics:
        joined = {group_of[name] for name in link.meet or file.fabric_names}
        group_of = {name: min(joined) if group in joined else group for name, group in group_of.items()}
        partitions.append([group_of[name] for name in names])
    return partitions


def gb_s(network: Rated) -> float:
    """Return the bandwidth of a card or link, 10^9 bytes/s; `check_cluster` ensures that it is given."""
    if network.bandwidth_gb_s is not None:
        return network.bandwidth_gb_s
    assert network.gbit_s is not None
    return network.gbit_s * GB_OF_GBIT


def _network(file: ClusterFile, nodes: Sequence[Node], ranks: Sequence[Rank]) -> Tier:
    """Return the tier of the links between nodes: one link for each card, GPU or node."""
    per: Per = "card"
    if file.network is not None and not any(entry.network for entry in file.nodes):
        per = file.network.per
    link_of: list[int] = []
    bandwidths: list[float] = []
    latencies: list[float] = []
    for node in nodes:
        assert node.cards is not None
        gpus = len(node.ranks)
        link_of += (len(bandwidths) + node.cards.card_of(gpu, gpus) for gpu in range(gpus))
        bandwidths += [node.cards.bandwidth] * node.cards.count
        latencies.append(node.cards.latency_s)
    return Tier("network", per, tuple(link_of), tuple(bandwidths), tuple(latencies), tuple(range(len(nodes))))


def _tier(
    name: str, per: Per, bandwidth: float, latency_us: float, group_of: Sequence[int], ranks: Sequence[Rank]
) -> Tier:
    """Return a tier whose links all have the same bandwidth and latency."""
    numbers = {"gpu": lambda rank: rank.rank, "node": lambda rank: rank.node}
    link_of = tuple(numbers.get(per, lambda rank: group_of[rank.node])(rank) for rank in ranks)
    latencies = (latency_us / MICRO,) * len(group_of)
    return Tier(name, per, link_of, (bandwidth,) * (1 + max(link_of)), latencies, tuple(group_of))
