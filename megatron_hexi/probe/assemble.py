"""Build the cluster file's plain values from a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_high
from typing import Any

from megatron_hexi.cluster import catalog
from megatron_hexi.cost.compute import CURVE_HEAD_DIM, head_size_factor
from megatron_hexi.cost.moved_bytes import HBM_SHARE
from megatron_hexi.errors import HexiError
from megatron_hexi.plan.terms import KERNEL_ALIASES
from megatron_hexi.probe.document import DIRECTIONS, MASKS, Measurement
from megatron_hexi.probe.merge import Merged, merge
from megatron_hexi.probe.network import bytes_per_second, collective_note, network_entry, round_rate
from megatron_hexi.probe.nodes import NodeFound, device_name, find_nodes, spellable

GIB = 2**30
#: Nodes whose usable memory differs by less have the same.
_MEMORY_TOLERANCE = 0.01
#: Of what is free of a host's memory a job may pin so much; its processes, which come later, take some.
HOST_SHARE = 0.8


def assemble(measured: Measurement, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the cluster file as plain values, nodes in the order of ranks, and notes for its user."""
    nodes = find_nodes(measured.ranks)
    kinds: dict[str, dict[int, NodeFound]] = {}
    for number, node in enumerate(nodes):
        kind = device_name(measured.ranks[node.ranks[0]], measured.options.precision)
        kinds.setdefault(kind, {})[number] = node
    entries: dict[int, dict[str, Any]] = {}
    devices: dict[str, Any] = {}
    notes: list[str] = []
    for kind, alike in kinds.items():
        merged = merge(kind, alike, measured.curves)
        notes += [*_other_versions(alike, measured), *merged.notes]
        usable = {
            n: min(measured.usable_bytes[rank] for rank in node.ranks) / GIB for n, node in alike.items()
        }
        devices[kind] = _device(kind, alike, merged, median_high(usable.values()), measured)
        for number, node in alike.items():
            entries[number] = _node(node, kind, merged.speeds[number], usable[number], devices[kind])
            entries[number] |= _host(node, measured)
    for link in measured.inside:
        entries[link.node]["intra"] = {
            "bandwidth_gb_s": round_rate(bytes_per_second(link.ports) / 1e9),
            "latency_us": round_rate(link.latency_s * 1e6),
        }
    network, network_of = network_entry(nodes, measured.between)
    for number, entry in network_of.items():
        entries[number]["network"] = entry
    slow = collective_note(measured.inside)
    notes += [*([slow] if slow else []), *(f"not measured: {text}" for text in measured.skipped)]
    return {
        "name": spellable(name),
        "nodes": [entries[number] for number in range(len(nodes))],
        **network,
        "devices": devices,
    }, notes


def _other_versions(nodes: Mapping[int, NodeFound], measured: Measurement) -> list[str]:
    """Return a note for each node whose kernels or versions differ from the first node's."""
    first_node, *other_nodes = nodes.values()
    software = [(info.kernels, info.versions) for info in measured.ranks]
    expected = software[first_node.ranks[0]]
    return [
        f"{node.name} has other kernels or versions than {first_node.name}: install the same on both"
        for node in other_nodes
        if any(software[rank] != expected for rank in node.ranks)
    ]


def _node(
    node: NodeFound, kind: str, speed: float, usable_gib: float, device: Mapping[str, Any]
) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.name, "gpu": kind, "gpus": len(node.ranks)}
    if node.host:
        entry["hosts"] = node.host
    share = usable_gib / device["usable_gib"]
    if abs(share - 1) > _MEMORY_TOLERANCE:  # the usable part of a node's memory_gb is the device's
        memory_gb = device.get("memory_gb") or catalog()[kind].memory_gb
        entry["memory_gb"] = round_rate(memory_gb * share)
    if speed != 1:
        entry["speed"] = round_rate(speed)
    return entry


def _host(node: NodeFound, measured: Measurement) -> dict[str, Any]:
    """Return a node's ``host``: memory that all its ranks may pin, and the slowest rank's copy bandwidth."""
    rates = [measured.host_gb_s[rank] for rank in node.ranks] if measured.host_gb_s else [None]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return {}
    free = HOST_SHARE * sum(measured.host_bytes[rank] for rank in node.ranks) / GIB
    stream = min(measured.host_stream_gb_s[rank] for rank in node.ranks)
    host = {"usable_gib": free, "bandwidth_gb_s": min(known), "memory_gb_s": stream}
    return {"host": {name: round_rate(value) for name, value in host.items()}}


def _device(
    kind: str, nodes: Mapping[int, NodeFound], merged: Merged, usable_gib: float, measured: Measurement
) -> dict[str, Any]:
    """Return a GPU's entry below ``devices:``, complete where the catalogue does not know the GPU."""
    ranks = [rank for node in nodes.values() for rank in node.ranks]
    first = measured.ranks[ranks[0]]
    versions = ", ".join(f"{package} {version}" for package, version in first.versions.items())
    source = f"measured {measured.started}, {measured.options.precision}, {versions}, hexi probe"
    known = kind in catalog()
    entry: dict[str, Any] = {} if known else {"memory_gb": round_rate(first.memory_bytes / GIB)}
    entry["usable_gib"] = round_rate(usable_gib)
    # The cost model takes HBM_SHARE of what stands here, and is to arrive at what was measured.
    entry["memory_gb_s"] = round_rate(median(measured.stream_gb_s[rank] for rank in ranks) / HBM_SHARE)
    if not known:
        if "matmul" not in merged.curves:
            raise _nothing(kind, "matmul")
        entry["capability"] = list(first.capability)
        entry["nominal"] = {measured.options.precision: round_rate(max(merged.curves["matmul"].values()))}
        entry["link"] = _link(nodes, measured, source)
        entry["source"] = "hexi probe; nominal is the best that was measured"
    if "matmul" in merged.curves:
        entry["matmul"] = _curve(merged.curves["matmul"], 1.0, source)
    entry["attention"] = _attention(kind, first.kernels, merged, measured, source, known=known)
    return entry


def _attention(
    kind: str, kernels: Sequence[str], merged: Merged, measured: Measurement, source: str, *, known: bool
) -> dict[str, Any]:
    head_dim = measured.options.head_dim
    factor = head_size_factor(head_dim)
    if factor != 1:
        source += f", heads of {head_dim}, over their {factor:.3g} of heads of {CURVE_HEAD_DIM}"
    entries: dict[str, Any] = {}
    for kernel in kernels:
        name = KERNEL_ALIASES.get(kernel, kernel)
        if name != kernel and name in kernels:
            continue  # what was measured under its own name is better
        masks: dict[str, Any] = {}
        for mask in MASKS:
            for direction in DIRECTIONS:
                curve = merged.curves.get(f"{kernel} {mask} {direction}")
                if curve:
                    text = source if name == kernel else f"{source}, {kernel}"
                    masks.setdefault(mask, {})[direction] = _curve(curve, factor, text)
                elif not known:
                    raise _nothing(kind, f"{kernel} {mask} {direction}")
        if masks:
            entries[name] = masks
    return entries


def _link(nodes: Mapping[int, NodeFound], measured: Measurement, source: str) -> dict[str, Any]:
    """Return the link between the GPUs of a node; nodes that differ have an ``intra`` of their own."""
    inside = [link for link in measured.inside if link.node in nodes]
    if inside:
        return {
            "kind": "as measured",
            "bandwidth_gb_s": round_rate(median(bytes_per_second(i.ports) for i in inside) / 1e9),
            "latency_us": round_rate(median(i.latency_s for i in inside) * 1e6),
            "source": source,
        }
    ranks = [rank for node in nodes.values() for rank in node.ranks]
    return {
        "kind": "not measured",
        "bandwidth_gb_s": round_rate(median(measured.stream_gb_s[rank] for rank in ranks)),
        "latency_us": 10.0,
        "estimate": "one rank a node: nothing to measure, or to use; as its memory, a small message's order",
    }


def _curve(points: Mapping[int, float], factor: float, source: str) -> dict[str, Any]:
    rates = [[size, round_rate(rate / factor)] for size, rate in sorted(points.items())]
    return {"points": rates, "source": source}


def _nothing(kind: str, curve: str) -> HexiError:
    return HexiError(
        f"{kind}: {curve} was measured at no size, and the catalogue has nothing to take its place; give it "
        "more --budget, or more memory"
    )
