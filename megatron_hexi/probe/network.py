"""The network of the cluster file (one network, cards of each node, or a matrix), and writing that file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from megatron_hexi.cluster import Cluster, cluster_from_yaml
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.probe.document import Between, Inside, Measurement
from megatron_hexi.probe.network_fit import agree, by_node, bytes_per_second, round_rate, same_latency
from megatron_hexi.probe.nodes import NodeFound
from megatron_hexi.text_file import write_text_atomically
from megatron_hexi.yaml_file import yaml_from_text

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
    per = _owner(nodes, between)
    gb_s = {
        (pair.src, pair.dst): bytes_per_second(pair.all_ranks)
        / 1e9
        / (_width(nodes, pair) if per == "gpu" else 1)
        for pair in between
    }
    latency_us = {(pair.src, pair.dst): pair.latency_s * 1e6 for pair in between}
    if agree(list(gb_s.values())) and same_latency(list(latency_us.values())):
        common = {"bandwidth_gb_s": round_rate(median(gb_s.values()))}
        return {"network": common | {"latency_us": round_rate(median(latency_us.values())), "per": per}}, {}
    whole = {(pair.src, pair.dst): bytes_per_second(pair.all_ranks) / 1e9 for pair in between}
    entry = by_node(nodes, whole, latency_us, {(pair.src, pair.dst): _gain(pair) for pair in between})
    return entry or (_matrix(nodes, whole, latency_us), {})


def shared_note(measured: Measurement, cluster: Cluster) -> str | None:
    """Return a note on how much longer all transfers at once take than the cost model expects."""
    if measured.together is None:
        return None
    ranks = np.array([rank.node for rank in cluster.ranks])
    src, dst = (np.array(side) for side in np.nonzero(ranks[:, None] != ranks[None, :]))
    size = np.full(len(src), float(measured.together.sizes[-1]))
    expected = LinkTable(cluster).set_seconds(src, dst, size)
    ratio = measured.together.seconds[-1] / expected
    text = f"all nodes at once take {ratio:.2f} times as long as the pairs say"
    if ratio <= _SHARED:
        return text
    return f"{text}: they share a link; describe it under levels:"


def collective_note(inside: Sequence[Inside]) -> str | None:
    """Return a note if the all-to-all takes much longer than its messages alone."""
    ratios = [link.all_to_all.seconds[-1] / _expected_s(link) for link in inside]
    if not ratios or median(ratios) <= _SHARED:
        return None
    return (
        f"inside nodes the all-to-all takes {median(ratios):.2f} times as long as its messages alone; the "
        "file has the messages' bandwidth"
    )


def _expected_s(link: Inside) -> float:
    return link.all_to_all.sizes[-1] / bytes_per_second(link.ports)


def _matrix(
    nodes: Sequence[NodeFound], whole: dict[tuple[int, int], float], latency_us: dict[tuple[int, int], float]
) -> dict[str, Any]:
    return {
        "matrix": {
            "nodes": [node.name for node in nodes],
            "bandwidth_gb_s": _rows(len(nodes), whole),
            "latency_us": _rows(len(nodes), latency_us),
        }
    }


def _gain(pair: Between) -> float | None:
    """Return the bandwidth of all ranks of two nodes over that of one rank each."""
    if pair.one_rank is None:
        return None
    return bytes_per_second(pair.all_ranks) / bytes_per_second(pair.one_rank)


def _owner(nodes: Sequence[NodeFound], between: Sequence[Between]) -> str:
    """Return ``gpu`` if all ranks together get more bandwidth than one alone, else ``node``.

    The line is drawn at the geometric mean of the two pure cases, 1 and the number of GPUs.
    """
    tried = [pair for pair in between if pair.one_rank is not None and _width(nodes, pair) > 1]
    gains = [
        math.log(bytes_per_second(pair.all_ranks) / bytes_per_second(pair.one_rank), _width(nodes, pair))
        for pair in tried
        if pair.one_rank is not None
    ]
    return "gpu" if gains and median(gains) > 0.5 else "node"


def _width(nodes: Sequence[NodeFound], pair: Between) -> int:
    return min(len(nodes[pair.src].ranks), len(nodes[pair.dst].ranks))


def _rows(count: int, values: dict[tuple[int, int], float]) -> list[list[float]]:
    return [[round_rate(values[a, b]) if a != b else 0.0 for b in range(count)] for a in range(count)]


def write_cluster(
    path: Path, data: dict[str, Any], notes: list[str], measured: Measurement
) -> tuple[Cluster, list[str]]:
    """Write the file whole or not at all.

    Returns:
        The cluster as the planner reads it, and all notes.
    """
    text = yaml.dump(data, Dumper=_ClusterDumper, sort_keys=False, width=110, allow_unicode=True)
    cluster = cluster_from_yaml(yaml_from_text(path, text))
    shared = shared_note(measured, cluster)
    comments = [*notes, shared] if shared else notes
    head = [f"measured by hexi probe, {measured.started}", *comments]
    write_text_atomically(path, "".join(f"# {line}\n" for line in head) + text)
    return cluster, comments


class _ClusterDumper(yaml.SafeDumper):
    """Dumps blocks at the top, and flow style for a node, a link, a curve and lists: as people write them."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        flow = "points" in mapping or not any(
            isinstance(value, dict) and key not in ("intra", "host") for key, value in mapping.items()
        )
        return super().represent_mapping(tag, mapping, flow_style=flow)

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        flow = not any(isinstance(item, dict) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flow)

    def ignore_aliases(self, data: Any) -> bool:
        return True
