"""Merges the curves of all ranks with one kind of GPU, and finds nodes and ranks that deviate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from megatron_hexi.grouping import grouped
from megatron_hexi.probe.document import Series
from megatron_hexi.probe.nodes import NodeFound

#: A node or rank that is off by more is named.
STRAGGLER = 0.05

#: A point of a curve: its name and the size.
Point = tuple[str, int]


@dataclass(frozen=True)
class Merged:
    """Merged curves of one kind of GPU.

    Args:
        curves: TFLOP/s at the sizes measured, by name.
        speeds: speed of each of its nodes by number, against the curves; 1 where it is within `STRAGGLER`.
    """

    curves: Mapping[str, Mapping[int, float]]
    speeds: Mapping[int, float]
    notes: tuple[str, ...]


def merge(name: str, nodes: Mapping[int, NodeFound], curves: Mapping[str, Series]) -> Merged:
    """Return medians over the ranks of each node, and over nodes after dividing by their speeds.

    The node of median speed is the reference (of two the faster one).
    """
    rates = {rank: _rates_of(rank, curves) for node in nodes.values() for rank in node.ranks}
    by_node = {n: _medians([rates[rank] for rank in node.ranks]) for n, node in nodes.items()}
    common = set.intersection(*(set(node_rates) for node_rates in by_node.values()))
    pace = {
        n: geometric_mean([node_rates[point] for point in sorted(common)]) if common else 1.0
        for n, node_rates in by_node.items()
    }
    reference = sorted(nodes, key=lambda n: (pace[n], -n))[len(nodes) // 2]
    ratios = {n: _ratio(node_rates, by_node[reference]) for n, node_rates in by_node.items()}
    speeds = {n: ratio if abs(ratio - 1) > STRAGGLER else 1.0 for n, ratio in ratios.items()}
    level = grouped(
        (point, rate / speeds[n]) for n, node_rates in by_node.items() for point, rate in node_rates.items()
    )
    curve: dict[str, dict[int, float]] = {}
    for (kind, size), values in sorted(level.items()):
        curve.setdefault(kind, {})[size] = median(values)
    notes = [
        f"{nodes[n].name} runs at {speed:.3g} of {nodes[reference].name}'s rates"
        for n, speed in speeds.items()
        if speed != 1
    ]
    off: list[float] = []
    for n, node in nodes.items():
        for rank in node.ranks:
            ratio = _ratio(rates[rank], by_node[n])
            if abs(ratio - 1) > STRAGGLER:
                notes.append(f"rank {rank} ({node.name}) runs at {ratio:.3g} of its node's median")
            off += [
                abs(rate / (speeds[n] * curve[kind][size]) - 1)
                for (kind, size), rate in rates[rank].items()
                if size in curve.get(kind, {})
            ]
    if off and len(rates) > 1:
        notes.append(
            f"{name}: its {len(rates)} ranks are off the curves by {median(off):.1%} in the median "
            f"point, {max(off):.1%} at most"
        )
    return Merged(curve, speeds, tuple(notes))


def _rates_of(rank: int, curves: Mapping[str, Series]) -> dict[Point, float]:
    return {
        (name, size): rate
        for name, series in curves.items()
        for size, rate in zip(series.sizes, series.tflops[rank], strict=True)
        if rate is not None
    }


def _medians(ranks: Sequence[Mapping[Point, float]]) -> dict[Point, float]:
    """Return the median of each point that all ranks have."""
    return {
        point: median(rates[point] for rates in ranks)
        for point in ranks[0]
        if all(point in rates for rates in ranks)
    }


def _ratio(rates: Mapping[Point, float], reference: Mapping[Point, float]) -> float:
    """Return the median ratio of the points that both have; 1 where they share none."""
    return median([rates[point] / reference[point] for point in rates if point in reference] or [1.0])
