"""Build the tiers of a cluster's links: between nodes, between fabrics, and between the groups of levels."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.cluster.links import Node, Per, Rank, Tier
from megatron_hexi.cluster.model import GB_OF_GBIT, ClusterFile, FabricLink, NetworkLevel, NodeNetwork

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


def gb_s(network: NodeNetwork | FabricLink | NetworkLevel) -> float:
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
