"""The network of the cluster file (one network, cards of each node, or a matrix), and writing that file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import numpy as np
import yaml

from megatron_hexi.cluster import Cluster, cluster_from_yaml
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.probe.document import Between, Inside, Measurement, TransferTimes
from megatron_hexi.probe.nodes import NodeFound
from megatron_hexi.text_file import write_text_atomically
from megatron_hexi.yaml_file import Dumper, yaml_from_text

#: The largest sizes are used: small ones tell of latency, buffers and bursts.
_LARGEST = 3


def bytes_per_second(transfer: TransferTimes) -> float:
    """Return the slope of seconds = alpha + bytes / bandwidth, by least squares over the three largest sizes.

    Where the line does not rise (one size, or noise alone): the plateau, the largest size over its time.
    """
    sizes, seconds = transfer.sizes[-_LARGEST:], transfer.seconds[-_LARGEST:]
    slope = linear_regression(sizes, seconds).slope if len(sizes) > 1 else 0.0
    return 1 / slope if slope > 0 else sizes[-1] / max(seconds[-1], 1e-9)


#: Bandwidths agree if they are within this part of the median one …
_BANDWIDTH_TOLERANCE = 0.1
#: … and latencies within this factor or time (µs) of the shortest: small messages are noisy.
_LATENCY_FACTOR, _LATENCY_US = 2.0, 20.0

#: A value for each two nodes, sender and receiver.
Pairs = Mapping[tuple[int, int], float]


def agree(rates: Sequence[float]) -> bool:
    """Return whether bandwidths are equal up to noise."""
    return max(rates) - min(rates) <= _BANDWIDTH_TOLERANCE * median(rates)


def same_latency(values_us: Sequence[float]) -> bool:
    """Return whether latencies are equal up to noise."""
    shortest, longest = min(values_us), max(values_us)
    return longest <= _LATENCY_FACTOR * shortest or longest - shortest <= _LATENCY_US


def round_rate(value: float) -> float:
    """Round to four digits: more would be noise."""
    return float(f"{value:.4g}")


def by_node(
    nodes: Sequence[NodeFound], whole: Pairs, latency_us: Pairs, gains: Pairs
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]] | None:
    """Return ``fabrics`` with its key, and ``network`` of each node, where they predict every pair.

    A node has what its best pair has. Two nodes that reach each other as fast as the slower one's cards are
    in one fabric; between fabrics there is one bandwidth for each node, slower than the cards.

    Args:
        whole: GB/s of each pair, all ranks sending.
        gains: bandwidth of all ranks of a pair over that of one rank each, where it was measured.

    Returns:
        ``None``: some pair is told wrongly.
    """
    count = range(len(nodes))
    way = [max(rate for pair, rate in whole.items() if node in pair) for node in count]
    fabric = _fabrics(whole, way)
    inside = {pair for pair in whole if fabric[pair[0]] == fabric[pair[1]]}
    if not all(agree([whole[a, b], min(way[a], way[b])]) for a, b in inside):
        return None
    own_us = [min(latency_us[pair] for pair in (inside or whole) if node in pair) for node in count]
    if not all(same_latency([latency_us[a, b], max(own_us[a], own_us[b])]) for a, b in inside):
        return None
    names = _names(nodes, fabric)
    cards = [_cards(nodes, node, way, inside, gains) for node in count]
    network_of = {
        node: {
            "cards": cards[node],
            "bandwidth_gb_s": round_rate(way[node] / cards[node]),
            "latency_us": round_rate(own_us[node]),
            "fabric": names[fabric[node]],
        }
        for node in count
    }
    across = [pair for pair in whole if pair not in inside]
    if not across:
        return {}, network_of
    extra_us = [max(0.0, latency_us[a, b] - max(own_us[a], own_us[b])) for a, b in across]
    if not agree([whole[pair] for pair in across]) or not same_latency([1.0 + extra for extra in extra_us]):
        return None
    joined = {"bandwidth_gb_s": round_rate(median(whole[pair] for pair in across)), "per": "node"}
    return {"fabrics": [joined | {"latency_us": round_rate(median(extra_us))}]}, network_of


def _fabrics(whole: Pairs, way: Sequence[float]) -> list[int]:
    """Return the fabric of each node, numbered in their order."""
    group = list(range(len(way)))
    for a, b in whole:
        if agree([whole[a, b], min(way[a], way[b])]):
            keep, drop = sorted((group[a], group[b]))
            group = [keep if number == drop else number for number in group]
    order = list(dict.fromkeys(group))
    return [order.index(number) for number in group]


def _names(nodes: Sequence[NodeFound], fabric: Sequence[int]) -> list[str]:
    """Return a name for each fabric: the kind of its cards, if known and unique, else with a number."""
    kinds_of: list[set[str | None]] = [set() for _ in range(1 + max(fabric))]
    for node, group in zip(nodes, fabric, strict=True):
        kinds_of[group].add(node.cards.fabric if node.cards else None)
    fabric_kinds = [kinds.pop() if len(kinds) == 1 else None for kinds in kinds_of]
    if fabric_kinds == [None]:
        return ["network"]
    return [
        f"fabric-{number}" if name is None or fabric_kinds.count(name) > 1 else name
        for number, name in enumerate(fabric_kinds)
    ]


def _cards(
    nodes: Sequence[NodeFound], node: int, way: Sequence[float], inside: set[tuple[int, int]], gains: Pairs
) -> int:
    """Return the number of a node's cards: its host's, or the bandwidth of all ranks over that of one.

    GPUs share cards evenly: of other numbers it is the next below, whose cards have more bandwidth each.
    Nodes at least as fast count, since with a slower one the ratio is that one's.
    """
    gpus = len(nodes[node].ranks)
    host_cards = nodes[node].cards
    if host_cards is not None:
        return _even(host_cards.count, gpus)
    gains_seen = [
        gain
        for pair, gain in gains.items()
        if pair in inside and node in pair and min(way[end] for end in pair) >= 0.9 * way[node]
    ]
    return _even(round(median(gains_seen)), gpus) if gains_seen else 1


def _even(cards: int, gpus: int) -> int:
    """Return the largest number up to `cards` that divides the number of GPUs; at least 1."""
    return max((number for number in range(1, min(cards, gpus) + 1) if gpus % number == 0), default=1)


#: Everything at once may take so much longer than its parts say before something must be shared.
_SHARED = 1.25


def network_entry(
    nodes: Sequence[NodeFound], between: Sequence[Between]
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the keys of the cluster file about the network, and ``network`` of each node by its number.

    One network where all pairs of nodes agree; network cards and fabrics of each node where the bandwidths of
    all pairs follow from these; else a matrix of all pairs. Nothing for a single node.
    """
    if not between:
        return {}, {}
    whole = {(pair.src, pair.dst): bytes_per_second(pair.all_ranks) / 1e9 for pair in between}
    latency_us = {(pair.src, pair.dst): pair.latency_s * 1e6 for pair in between}
    gains = {
        (pair.src, pair.dst): bytes_per_second(pair.all_ranks) / bytes_per_second(pair.one_rank)
        for pair in between
        if pair.one_rank is not None
    }
    width = {(a, b): min(len(nodes[a].ranks), len(nodes[b].ranks)) for a, b in whole}
    per = _owner(gains, width)
    gb_s = [rate / width[pair] if per == "gpu" else rate for pair, rate in whole.items()]
    if agree(gb_s) and same_latency(list(latency_us.values())):
        common = {"bandwidth_gb_s": round_rate(median(gb_s))}
        return {"network": common | {"latency_us": round_rate(median(latency_us.values())), "per": per}}, {}
    if (entry := by_node(nodes, whole, latency_us, gains)) is not None:
        return entry
    matrix = {
        "nodes": [node.name for node in nodes],
        "bandwidth_gb_s": _rows(len(nodes), whole),
        "latency_us": _rows(len(nodes), latency_us),
    }
    return {"matrix": matrix}, {}


def shared_note(measured: Measurement, cluster: Cluster) -> str | None:
    """Return a note on how much longer all transfers at once take than the cost model expects."""
    if measured.together is None:
        return None
    ranks = np.array([rank.node for rank in cluster.ranks])
    src, dst = (np.array(side) for side in np.nonzero(ranks[:, None] != ranks[None, :]))
    size = np.full(len(src), float(measured.together.sizes[-1]))
    expected = LinkTable(cluster).set_seconds(src, dst, size)
    ratio = measured.together.seconds[-1] / expected
    remedy = ": they share a link; describe it under levels:" if ratio > _SHARED else ""
    return f"all nodes at once take {ratio:.2f} times as long as the pairs say{remedy}"


def collective_note(inside: Sequence[Inside]) -> str | None:
    """Return a note if the all-to-all takes much longer than its messages alone."""
    ratios = [
        link.all_to_all.seconds[-1] / (link.all_to_all.sizes[-1] / bytes_per_second(link.ports))
        for link in inside
    ]
    if not ratios or (ratio := median(ratios)) <= _SHARED:
        return None
    text = f"inside nodes the all-to-all takes {ratio:.2f} times as long as its messages alone"
    return f"{text}; the file has the messages' bandwidth"


def _owner(gains: Pairs, width: Mapping[tuple[int, int], int]) -> str:
    """Return ``gpu`` if all ranks together get more bandwidth than one alone, else ``node``.

    The line is drawn at the geometric mean of the two pure cases, 1 and the number of GPUs.
    """
    shares = [math.log(gain, width[pair]) for pair, gain in gains.items() if width[pair] > 1]
    return "gpu" if shares and median(shares) > 0.5 else "node"


def _rows(count: int, values: Pairs) -> list[list[float]]:
    return [[round_rate(values[a, b]) if a != b else 0.0 for b in range(count)] for a in range(count)]


def write_cluster(
    path: Path, data: dict[str, Any], notes: list[str], measured: Measurement
) -> tuple[Cluster, list[str]]:
    """Write the file whole or not at all; return the cluster as the planner reads it, and all notes."""
    text = yaml.dump(data, Dumper=_ClusterDumper, sort_keys=False, width=110, allow_unicode=True)
    cluster = cluster_from_yaml(yaml_from_text(path, text))
    shared = shared_note(measured, cluster)
    comments = [*notes, shared] if shared else notes
    head = [f"measured by hexi probe, {measured.started}", *comments]
    write_text_atomically(path, "".join(f"# {line}\n" for line in head) + text)
    return cluster, comments


class _ClusterDumper(Dumper):
    """A YAML dumper that writes a node, a link and a curve on one line, too."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        flow = "points" in mapping or not any(
            isinstance(value, dict) and key not in ("intra", "host") for key, value in mapping.items()
        )
        return super().represent_mapping(tag, mapping, flow_style=flow)
