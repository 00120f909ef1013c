"""The cluster file as frozen data: nodes, the links between them, and its own GPUs.

Everywhere: GB is 10^9 bytes, bandwidth is a direction, latency is of one message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from megatron_hexi.cluster.entries import STRICT, DeviceEntry, Latency, Memory, Name, Rate, Text
from megatron_hexi.cluster.planner_rules import ANYTHING, PlannerRules
from megatron_hexi.hostlist import expand_hostlist

#: More is a typing error, and is refused before anything is built for each of them.
MAX_GPUS = 65536
#: A measured matrix has a row a node; beyond this, levels describe a cluster better.
MAX_MATRIX_NODES = 1024
#: Between nodes where the file does not say: Calculon counts 10-20 µs (arXiv 2303.08375).
NETWORK_LATENCY_US = 10.0
#: 10^9 bytes/s of 10^9 bits/s.
GB_OF_GBIT = 1 / 8

Count = Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)]
Factor = Annotated[float, Field(strict=True, gt=0, le=100, allow_inf_nan=False)]
#: Zero or nothing: no link; a rule then says which two cannot reach each other.
MaybeRate = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)] | None
MaybeLatency = Latency | None

_ONE_OR_MANY = re.compile(r"(?P<base>.+)-(?P<first>\d+)(\.\.(?P<last>\d+))?")


@dataclass(frozen=True)
class Intra:
    """Links inside a node, in place of the catalogue's.

    Args:
        bandwidth_gb_s: bandwidth of each GPU, 10^9 bytes/s a direction.
        latency_us: latency of one message, µs; the catalogue's if left out.
    """

    bandwidth_gb_s: Rate
    latency_us: Latency | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class NodeHost:
    """Memory of the node itself, in place of the catalogue's.

    Args:
        usable_gib: memory that a job may pin on the whole node, GiB.
        bandwidth_gb_s: bandwidth of copies between each GPU and pinned memory, while all GPUs copy.
        memory_gb_s: bandwidth of that memory for the processes of each GPU, while all use it.
    """

    usable_gib: Memory | None = None
    bandwidth_gb_s: Rate | None = None
    memory_gb_s: Rate | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class NodeNetwork:
    """A node's cards to other nodes: each with `gbit_s`, or with `bandwidth_gb_s`.

    Args:
        cards: number of cards; the GPUs of a node share them evenly, neighbours the same one.
        gbit_s: line rate of each card, 10^9 bits/s: ``400``.
        bandwidth_gb_s: measured bandwidth of each card, in place of `gbit_s`.
        latency_us: latency between two nodes; if they differ, the longer one counts.
        fabric: name of the network that the cards are on: ``infiniband``, ``roce``, ``ethernet``, or any.
    """

    cards: Count = 1
    gbit_s: Rate | None = None
    bandwidth_gb_s: Rate | None = None
    latency_us: Latency = NETWORK_LATENCY_US
    fabric: Name = "network"

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class NodeEntry:
    """`count` nodes alike, called ``name-0``, ``name-1`` and so on.

    Args:
        name: name of the nodes in the rest of the file.
        gpu: a GPU of the catalogue, or of ``devices:``.
        gpus: number of GPUs of each node.
        count: number of nodes.
        memory_gb: memory of each GPU as sold; the usable part keeps its share.
        speed: factor on all its curves (0.8: throttled to four fifths).
        intra: links inside the node.
        host: the node's own memory, for offload.
        network: the node's cards, in place of the file's `network`.
        hosts: Slurm's names of the nodes, in order, as ``h[01-06]``; `count` is then how many these are.
    """

    name: Name
    gpu: Text
    gpus: Count
    count: Count = 1
    memory_gb: Memory | None = None
    speed: Factor = 1.0
    intra: Intra | None = None
    host: NodeHost | None = None
    network: NodeNetwork | None = None
    hosts: Text | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Network:
    """The network between nodes that have no `network` of their own.

    Args:
        bandwidth_gb_s: bandwidth of each owner that `per` names.
        latency_us: latency between two nodes.
        per: ``node``: all GPUs of a node share its link; ``gpu``: each GPU has a card of its own.
    """

    bandwidth_gb_s: Rate
    latency_us: Latency = NETWORK_LATENCY_US
    per: Literal["gpu", "node"] = "node"

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class FabricLink:
    """The link between nodes of different fabrics: with `gbit_s`, or with `bandwidth_gb_s`.

    Args:
        meet: the fabrics, with all that an earlier entry joined to them; else all of the file.
        gbit_s: line rate of what `per` says, 10^9 bits/s.
        bandwidth_gb_s: measured bandwidth, in place of `gbit_s`.
        latency_us: added to that of the nodes' cards.
        per: ``node`` or ``gpu``: each has so much of its own; ``fabric``: shared by all of a fabric.
    """

    meet: Annotated[tuple[Name, ...], Field(min_length=2)] | None = None
    gbit_s: Rate | None = None
    bandwidth_gb_s: Rate | None = None
    latency_us: Latency = 0.0
    per: Literal["gpu", "node", "fabric"] = "node"

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Level:
    """A level above the node: racks, fabrics, sites.

    Args:
        name: name in reports.
        groups: nodes of each group: ``h100`` (all of that name), ``h100-0`` or ``h100-0..3``; each node
            once, in whole groups of the level before.
        bandwidth_gb_s: bandwidth out of a group, and into it.
        latency_us: added to the levels inside.
        per: ``group``: shared by all of the group; ``node`` or ``gpu``: each has so much of its own.
    """

    name: Name
    groups: Annotated[tuple[Annotated[tuple[Text, ...], Field(min_length=1)], ...], Field(min_length=1)]
    bandwidth_gb_s: Rate
    latency_us: Latency = 0.0
    per: Literal["gpu", "node", "group"] = "group"

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Matrix:
    """Bandwidth measured between every two nodes, with all GPUs sending; a row sends, a column receives.

    Args:
        nodes: ``h100-0``, …, every node once, in the order of rows and columns.
        bandwidth_gb_s: a row for each node; the diagonal is not read.
        latency_us: latency in the same layout.
    """

    nodes: Annotated[tuple[Text, ...], Field(min_length=1, max_length=MAX_MATRIX_NODES)]
    bandwidth_gb_s: tuple[tuple[MaybeRate, ...], ...]
    latency_us: tuple[tuple[MaybeLatency, ...], ...]

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class ClusterFile:
    """A cluster file. Several nodes need `network`, here or at each node, or `matrix`.

    Args:
        name: name in reports.
        nodes: ranks are numbered in this order.
        network: between nodes that have none of their own.
        fabrics: links between nodes of different fabrics, from inside out.
        levels: above the node, from inside out.
        matrix: measured links, in place of `network`, `fabrics` and `levels`.
        devices: your own GPUs and measured curves.
        planner: the features that plans may use, unless the command line says otherwise.
    """

    name: Name
    nodes: Annotated[tuple[NodeEntry, ...], Field(min_length=1)]
    network: Network | None = None
    fabrics: tuple[FabricLink, ...] = ()
    levels: tuple[Level, ...] = ()
    matrix: Matrix | None = None
    devices: dict[Name, DeviceEntry] = field(default_factory=dict)
    planner: PlannerRules = ANYTHING

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def node_count(self) -> int:
        """Number of nodes over all entries."""
        return sum(entry.count for entry in self.nodes)

    @property
    def gpu_count(self) -> int:
        """Number of GPUs over all entries."""
        return sum(entry.count * entry.gpus for entry in self.nodes)

    @cached_property
    def node_numbers(self) -> dict[str, range]:
        """Numbers of each entry's nodes, in file order."""
        numbers, start = {}, 0
        for entry in self.nodes:
            numbers[entry.name] = range(start, start + entry.count)
            start += entry.count
        return numbers

    @cached_property
    def networks(self) -> tuple[NodeNetwork, ...]:
        """The network of each entry: its own, or else the file's; ``None`` without either."""
        common = self.network
        if common is None:
            return tuple(entry.network for entry in self.nodes if entry.network is not None)
        return tuple(
            entry.network
            or NodeNetwork(
                cards=entry.gpus if common.per == "gpu" else 1,
                bandwidth_gb_s=common.bandwidth_gb_s,
                latency_us=common.latency_us,
            )
            for entry in self.nodes
        )

    @cached_property
    def fabric_names(self) -> tuple[str, ...]:
        """All fabrics, in the order of the nodes."""
        return tuple(dict.fromkeys(network.fabric for network in self.networks))

    @cached_property
    def hosts(self) -> tuple[str | None, ...]:
        """Slurm's name of each node; ``None`` where the file does not give it."""
        names: list[str | None] = []
        for entry in self.nodes:
            names += expand_hostlist(entry.hosts) if entry.hosts else [None] * entry.count
        return tuple(names)

    def find_nodes(self, text: str) -> range | None:
        """Return the numbers of the nodes named ``h100``, ``h100-0`` or ``h100-0..3``; ``None`` for none."""
        if text in self.node_numbers:
            return self.node_numbers[text]
        match = _ONE_OR_MANY.fullmatch(text)
        if match is None or match["base"] not in self.node_numbers:
            return None
        numbers = self.node_numbers[match["base"]]
        first, last = int(match["first"]), int(match["last"] or match["first"])
        return numbers[first : last + 1] if first <= last < len(numbers) else None
