"""What a topology is made of: ranks, nodes, tiers of links, and routes over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_hexi.cluster.device import Device

Per = Literal["gpu", "node", "group", "pair"]
Way = Literal["out", "in"]


class LinkId(NamedTuple):
    """One direction of one link.

    Args:
        tier: 0 inside a node, 1 between nodes, 2 and up the file's levels.
        per: what owns it.
        owner: number of the rank, node or group (of that level); sender x nodes + receiver for a pair.
        way: from its owner or to it.
    """

    tier: int
    per: Per
    owner: int
    way: Way


@dataclass(frozen=True)
class Route:
    """The way from one rank to another: links in order, and the time of a message without bytes (s)."""

    links: tuple[LinkId, ...]
    latency_s: float


@dataclass(frozen=True)
class Node:
    """A node: its name, GPU, ranks, and the link of each GPU inside it (bytes/s a direction, s)."""

    name: str
    device: Device
    ranks: range
    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Rank:
    """A GPU: its number in the job, its node's number, its number inside the node, and what it is."""

    rank: int
    node: int
    local: int
    device: Device


@dataclass(frozen=True)
class Tier:
    """Links between nodes, or between the groups of a level.

    Args:
        name: ``network``, or the level's.
        per: what has a link of its own.
        bandwidth: of each link, bytes/s a direction.
        latency_s: added by crossing it once.
        group_of: the group of each node; a node is its own group between nodes.
        factors: on the bandwidth of some links, by their group, or else by their node; 1 for the others.
    """

    name: str
    per: Per
    bandwidth: float
    latency_s: float
    group_of: tuple[int, ...]
    factors: Mapping[int, float] = field(default_factory=dict)
