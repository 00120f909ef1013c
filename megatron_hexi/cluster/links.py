"""Nodes, ranks, and the links and tiers of links that make up a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_hexi.cluster.device import Device

Per = Literal["gpu", "card", "node", "group", "pair"]
Way = Literal["out", "in"]


class LinkId(NamedTuple):
    """One direction of a link: into or out of a rank, card, node, group or pair of nodes.

    Args:
        tier: 0 inside a node, 1 between nodes, 2 and up the file's levels.
        per: owner of the link.
        owner: number of the rank, card, node or group (of that level); sender x nodes + receiver for a pair.
        way: ``out`` of its owner or ``in``.
    """

    tier: int
    per: Per
    owner: int
    way: Way


@dataclass(frozen=True)
class Route:
    """The links that a transfer occupies, in order, and its latency, s."""

    links: tuple[LinkId, ...]
    latency_s: float


@dataclass(frozen=True)
class Cards:
    """The network cards of a node.

    Args:
        count: number of cards, at most one for each GPU.
        bandwidth: bandwidth of each card, bytes/s a direction.
        latency_s: latency between two nodes, s.
        fabric: name of the network that the cards are on.
    """

    count: int
    bandwidth: float
    latency_s: float
    fabric: str

    def card_of(self, gpu: int, gpus: int) -> int:
        """Return the number of the card that a GPU of the node uses."""
        return gpu * self.count // gpus

    def way_out(self, used: int, gpus: int) -> float:
        """Return the total bandwidth of the node's first `used` GPUs to other nodes, bytes/s."""
        return self.bandwidth * (1 + self.card_of(used - 1, gpus)) if used else 0.0


@dataclass(frozen=True)
class Node:
    """A node: its name, GPU, ranks, the link of each GPU inside it (bytes/s a direction, s), and its cards.

    Cards are ``None`` where nothing is known of them: with a measured matrix, or without other nodes.
    """

    name: str
    device: Device
    ranks: range
    bandwidth: float
    latency_s: float
    cards: Cards | None = None


@dataclass(frozen=True)
class Rank:
    """A GPU: its number in the job, its node's number, its number inside the node, and its device."""

    rank: int
    node: int
    local: int
    device: Device


@dataclass(frozen=True)
class Tier:
    """Links between nodes, or between the groups of a level.

    Args:
        name: ``network``, or the level's.
        per: owner of each link.
        link_of: the number of each rank's link: the rank, its node, its group, or a card of all.
        bandwidths: bandwidth of each link, bytes/s a direction.
        latencies_s: added by crossing it once, by node; of two nodes the longer one counts.
        group_of: the group of each node; a node is its own group between nodes.
    """

    name: str
    per: Per
    link_of: tuple[int, ...]
    bandwidths: tuple[float, ...]
    latencies_s: tuple[float, ...]
    group_of: tuple[int, ...]

    @cached_property
    def sharers(self) -> tuple[int, ...]:
        """Number of ranks on each link."""
        counts = Counter(self.link_of)
        return tuple(counts[link] for link in range(len(self.bandwidths)))

    @cached_property
    def first_ranks(self) -> Mapping[int, int]:
        """The first rank of each link."""
        return {link: rank for rank, link in reversed(list(enumerate(self.link_of)))}

    def latency_s(self, a: int, b: int) -> float:
        """Return the latency that the tier adds between two nodes, s."""
        return max(self.latencies_s[a], self.latencies_s[b])

    def at_bandwidths(self, factors: Mapping[int, float], node_of: Sequence[int]) -> Tier:
        """Return this tier with bandwidths multiplied by `factors`, which are by group, or else by node."""
        number_of = [self.group_of[node] for node in node_of] if self.per == "group" else node_of
        factor_of = {link: factors.get(number_of[rank], 1.0) for link, rank in self.first_ranks.items()}
        widths = (width * factor_of.get(link, 1.0) for link, width in enumerate(self.bandwidths))
        return replace(self, bandwidths=tuple(widths))

    def of(self, ranks: Sequence[int], place: Mapping[int, int]) -> Tier:
        """Return this tier for the ranks of some nodes, renumbered; groups keep their numbers.

        Args:
            ranks: the ranks that remain.
            place: the new number of each remaining node, in their order.
        """
        links = [self.link_of[rank] for rank in ranks]
        latencies = tuple(self.latencies_s[node] for node in place)
        if self.per == "group":
            group_of = tuple(self.group_of[node] for node in place)
            return replace(self, link_of=tuple(links), latencies_s=latencies, group_of=group_of)
        new = {link: number for number, link in enumerate(dict.fromkeys(links))}
        is_first = all(group == node for node, group in enumerate(self.group_of))
        return replace(
            self,
            link_of=tuple(new[link] for link in links),
            bandwidths=tuple(self.bandwidths[link] for link in new),
            latencies_s=latencies,
            group_of=tuple(place[node] if is_first else self.group_of[node] for node in place),
        )
