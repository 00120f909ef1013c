"""Fits cards of each node, and fabrics, to bandwidths measured between every two nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from megatron_hexi.probe.document import TransferTimes
from megatron_hexi.probe.nodes import NodeFound

#: The largest sizes are used: small ones tell of latency, buffers and bursts.
_LARGEST = 3


def bytes_per_second(transfer: TransferTimes) -> float:
    """Return the slope of seconds = alpha + bytes / bandwidth, by least squares over the three largest sizes.

    Where the line does not rise (one size, or noise alone): the plateau, the largest size over its time.
    """
    sizes = transfer.sizes[-_LARGEST:]
    seconds = transfer.seconds[-_LARGEST:]
    mean_size, mean_time = fmean(sizes), fmean(seconds)
    rise = sum((n - mean_size) * (t - mean_time) for n, t in zip(sizes, seconds, strict=True))
    run = sum((n - mean_size) ** 2 for n in sizes)
    if rise > 0 and run > 0:
        return run / rise
    return sizes[-1] / max(seconds[-1], 1e-9)


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
    nodes: Sequence[NodeFound],
    whole: Pairs,
    latency_us: Pairs,
    gains: Mapping[tuple[int, int], float | None],
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]] | None:
    """Return ``fabrics`` with its key, and ``network`` of each node, where they predict every pair.

    A node has what its best pair has. Two nodes that reach each other as fast as the slower one's cards are
    in one fabric; between fabrics there is one bandwidth for each node, slower than the cards.

    Args:
        whole: GB/s of each pair, all ranks sending.
        gains: bandwidth of all ranks of a pair over that of one rank each; ``None``: not measured.

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
    fabric_kinds: list[str | None] = []
    for number in range(1 + max(fabric)):
        cards = [node.cards for node, group in zip(nodes, fabric, strict=True) if group == number]
        kinds = {None if card is None else card.fabric for card in cards}
        fabric_kinds.append(kinds.pop() if len(kinds) == 1 else None)
    usual = (
        ["network"] if len(fabric_kinds) == 1 else [f"fabric-{number}" for number in range(len(fabric_kinds))]
    )
    return [
        default if name is None or fabric_kinds.count(name) > 1 else name
        for name, default in zip(fabric_kinds, usual, strict=True)
    ]


def _cards(
    nodes: Sequence[NodeFound],
    node: int,
    way: Sequence[float],
    inside: set[tuple[int, int]],
    gains: Mapping[tuple[int, int], float | None],
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
        if pair in inside
        and node in pair
        and gain is not None
        and min(way[end] for end in pair) >= 0.9 * way[node]
    ]
    return _even(round(median(gains_seen)), gpus) if gains_seen else 1


def _even(cards: int, gpus: int) -> int:
    """Return the largest number up to `cards` that divides the number of GPUs; at least 1."""
    return max((number for number in range(1, min(cards, gpus) + 1) if gpus % number == 0), default=1)
