"""The cluster file as data classes: nodes, links between nodes, and the file's own GPU models.

In this module GB is 10^9 bytes, a bandwidth holds per direction, and a latency is the latency of one message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from megatron_hexi.cluster.entries import DeviceEntry
from megatron_hexi.cluster.schema import Latency, Memory, Name, Rate, Text
from megatron_hexi.hostlist import expand_hostlist
from megatron_hexi.yaml_schema import Strict

Flag = Annotated[bool, Field(strict=True)] | None


@dataclass(frozen=True)
class PlannerRules(Strict):
    """Whether plans may use each of five features; a feature that is not stated is allowed.

    Args:
        ministages: stages that run in several parts: one after the other, with weights that are fetched when
            they are needed, or interleaved.
        offload: weights, optimizer state or activations in host memory.
        unequal_replicas: data-parallel replicas with different GPUs, stages or numbers of micro-batches.
        unequal_stages: pipeline stages with different numbers of layers; ministages and offload need them.
        unequal_experts: ranks that hold different numbers of a layer's experts.
    """

    ministages: Flag = None
    offload: Flag = None
    unequal_replicas: Flag = None
    unequal_stages: Flag = None
    unequal_experts: Flag = None

    def over(self, defaults: PlannerRules) -> PlannerRules:
        """Return these rules, with features that they do not state taken from `defaults`."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return PlannerRules(**(vars(defaults) | values))

    def allow(self, feature: str) -> bool:
        """Return whether plans may use a feature, given by its field name."""
        return getattr(self, feature) is not False

    @property
    def refused(self) -> tuple[str, ...]:
        """Names of the features that plans may not use, in the order of the fields."""
        return tuple(field.name for field in fields(self) if not self.allow(field.name))


#: Share of usable memory that plans keep free unless told otherwise.
MEMORY_MARGIN: Final = 0.05
#: Rules that allow every feature.
ANYTHING: Final = PlannerRules()


#: Largest number of GPUs; more are taken for a typing error, and refused before an object is built for each.
MAX_GPUS = 65536
#: Largest number of nodes with a measured matrix, which has a row per node; levels describe more better.
MAX_MATRIX_NODES = 1024
#: Latency between nodes, µs, if the file gives none; Calculon assumes 10-20 µs (arXiv 2303.08375).
NETWORK_LATENCY_US = 10.0
#: Factor from 10^9 bits/s to 10^9 bytes/s.
GB_OF_GBIT = 1 / 8

Count = Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)]
Factor = Annotated[float, Field(strict=True, gt=0, le=100, allow_inf_nan=False)]
#: A rate of a link; zero or ``None`` stands for no link, and a rule names nodes that cannot reach each other.
MaybeRate = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)] | None
MaybeLatency = Latency | None


def _as_hostlist(value: Any) -> Any:
    """Return a list of host names as Slurm writes it."""
    is_list = isinstance(value, list) and all(isinstance(host, str) for host in value)
    return ",".join(value) if is_list else value


Hosts = Annotated[Text, BeforeValidator(_as_hostlist)]

_ONE_OR_MANY = re.compile(r"(?P<base>.+)-(?P<first>\d+)(\.\.(?P<last>\d+))?")


@dataclass(frozen=True)
class Intra(Strict):
    """The links between the GPUs of a node, in place of the catalogue's figures.

    Args:
        bandwidth_gb_s: bandwidth of each GPU, 10^9 bytes/s per direction.
        latency_us: latency of one message, µs; left out: the catalogue's figure.
    """

    bandwidth_gb_s: Rate
    latency_us: Latency | None = None


@dataclass(frozen=True)
class NodeHost(Strict):
    """The host memory of a node, in place of the catalogue's figures.

    Args:
        usable_gib: host memory that a job may pin on the whole node, GiB.
        bandwidth_gb_s: bandwidth of copies between each GPU and pinned memory while all GPUs copy.
        memory_gb_s: bandwidth of host memory for the processes of each GPU while all use it.
    """

    usable_gib: Memory | None = None
    bandwidth_gb_s: Rate | None = None
    memory_gb_s: Rate | None = None


@dataclass(frozen=True)
class NodeNetwork(Strict):
    """The network cards of a node, with either `gbit_s` or `bandwidth_gb_s`.

    Args:
        cards: number of cards; the GPUs of a node share the cards evenly, neighbouring GPUs the same card.
        gbit_s: line rate of each card, 10^9 bits/s: ``400``.
        bandwidth_gb_s: measured bandwidth of each card, in place of `gbit_s`.
        latency_us: latency between two nodes; of two nodes with different latencies the longer one counts.
        fabric: name of the network to which the cards are connected: ``infiniband``, ``roce``, ``ethernet``,
            or any other name.
    """

    cards: Count = 1
    gbit_s: Rate | None = None
    bandwidth_gb_s: Rate | None = None
    latency_us: Latency = NETWORK_LATENCY_US
    fabric: Name = "network"


@dataclass(frozen=True)
class NodeEntry(Strict):
    """An entry of `count` equal nodes, which are named ``name-0``, ``name-1`` and so on.

    Args:
        name: name of the nodes in the rest of the file.
        gpu: name of a GPU in the catalogue, or under ``devices:``.
        gpus: number of GPUs of each node.
        count: number of nodes.
        memory_gb: memory of each GPU as the vendor sells it, of which the same fraction is usable.
        speed: factor on all rates of the GPU (0.8: throttled to four fifths).
        intra: links between the GPUs of each node.
        host: host memory of each node, for offloading.
        network: network cards of each node, in place of the file's `network`.
        hosts: Slurm's names of the nodes, in order, such as ``h[01-06]`` or a list; `count` is then the
            number of names.
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
    hosts: Hosts | None = None


@dataclass(frozen=True)
class Network(Strict):
    """The network between the nodes whose entries have no `network`: either `gbit_s` or `bandwidth_gb_s`.

    Args:
        gbit_s: line rate of each node's or each GPU's link, as `per` says, 10^9 bits/s.
        bandwidth_gb_s: measured bandwidth of each link, in place of `gbit_s`.
        latency_us: latency between two nodes.
        per: owner of a link. ``node``: all GPUs of a node share one link; ``gpu``: each GPU has its own card.
    """

    gbit_s: Rate | None = None
    bandwidth_gb_s: Rate | None = None
    latency_us: Latency = NETWORK_LATENCY_US
    per: Literal["gpu", "node"] = "node"


@dataclass(frozen=True)
class FabricLink(Strict):
    """A link between nodes of different fabrics, with either `gbit_s` or `bandwidth_gb_s`.

    Args:
        meet: names of the fabrics that the link joins, including the fabrics that an earlier entry joined to
            them; left out: all fabrics of the file.
        gbit_s: line rate of each owner of a link, as `per` says, 10^9 bits/s.
        bandwidth_gb_s: measured bandwidth, in place of `gbit_s`.
        latency_us: latency that is added to the latency of the nodes' cards.
        per: owner of a link. ``node`` or ``gpu``: each node or GPU has its own; ``fabric``: all nodes of a
            fabric share one.
    """

    meet: Annotated[tuple[Name, ...], Field(min_length=2)] | None = None
    gbit_s: Rate | None = None
    bandwidth_gb_s: Rate | None = None
    latency_us: Latency = 0.0
    per: Literal["gpu", "node", "fabric"] = "node"


@dataclass(frozen=True)
class NetworkLevel(Strict):
    """A level of groups of nodes, such as racks or sites, and their links: `gbit_s` or `bandwidth_gb_s`.

    Args:
        name: name of the level in reports.
        groups: nodes of each group: ``h100`` (all nodes of that name), ``h100-0`` or ``h100-0..3``. Each node
            is in one group; groups of the level before are not split.
        gbit_s: line rate of each owner of a link, as `per` says, in either direction, 10^9 bits/s.
        bandwidth_gb_s: measured bandwidth, in place of `gbit_s`.
        latency_us: latency that is added to the latency of the levels before.
        per: owner of a link. ``group``: all nodes of a group share one link out of the group; ``node`` or
            ``gpu``: each node or GPU has its own.
    """

    name: Name
    groups: Annotated[tuple[Annotated[tuple[Text, ...], Field(min_length=1)], ...], Field(min_length=1)]
    gbit_s: Rate | None = None
    bandwidth_gb_s: Rate | None = None
    latency_us: Latency = 0.0
    per: Literal["gpu", "node", "group"] = "group"


@dataclass(frozen=True)
class Matrix(Strict):
    """The bandwidth measured between any two nodes while all their GPUs send.

    Args:
        nodes: names of all nodes (``h100-0``, …), each once, in the order of rows and columns.
        bandwidth_gb_s: bandwidth from the row's node to the column's node; the diagonal is not read.
        latency_us: latency from the row's node to the column's node.
    """

    nodes: Annotated[tuple[Text, ...], Field(min_length=1, max_length=MAX_MATRIX_NODES)]
    bandwidth_gb_s: tuple[tuple[MaybeRate, ...], ...]
    latency_us: tuple[tuple[MaybeLatency, ...], ...]


@dataclass(frozen=True)
class ClusterFile(Strict):
    """A cluster file. A cluster of several nodes needs `network`, here or in each node entry, or `matrix`.

    Args:
        name: name of the cluster in reports.
        nodes: entries of nodes; ranks are numbered in their order.
        network: network between the nodes whose entries have no `network`.
        fabrics: links between nodes of different fabrics, from the inside out.
        levels: levels of groups of nodes, such as racks, from the inside out.
        matrix: measured links between nodes, in place of `network`, `fabrics` and `levels`.
        devices: GPU models that the catalogue lacks, and measured curves, by name of the GPU.
        planner: features that plans may use, unless the command line says otherwise.
    """

    name: Name
    nodes: Annotated[tuple[NodeEntry, ...], Field(min_length=1)]
    network: Network | None = None
    fabrics: tuple[FabricLink, ...] = ()
    levels: tuple[NetworkLevel, ...] = ()
    matrix: Matrix | None = None
    devices: dict[Name, DeviceEntry] = field(default_factory=dict)
    planner: PlannerRules = ANYTHING

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
        """Numbers of the nodes of each entry, by name of the entry, in file order."""
        numbers, start = {}, 0
        for entry in self.nodes:
            numbers[entry.name] = range(start, start + entry.count)
            start += entry.count
        return numbers

    @cached_property
    def networks(self) -> tuple[NodeNetwork, ...]:
        """The network of each node entry: the entry's, or else the file's; empty if an entry has neither."""
        common = self.network
        if common is None:
            return tuple(entry.network for entry in self.nodes if entry.network is not None)
        return tuple(
            entry.network or _cards_of(common, entry.gpus, common.latency_us) for entry in self.nodes
        )

    @cached_property
    def fabric_names(self) -> tuple[str, ...]:
        """Names of all fabrics, in the order of the nodes."""
        return tuple(dict.fromkeys(network.fabric for network in self.networks))

    def over_meeting_cards(self) -> ClusterFile:
        """Return a file of the same nodes in one fabric: each node has the cards by which fabrics meet alone.

        With several entries in `fabrics` the cards are those of the slowest. Of cards that all nodes of a
        fabric share, each node is given one, which is too much.
        """
        slowest = min(self.fabrics, key=lambda link: link.bandwidth_gb_s or (link.gbit_s or 0.0) / 8)
        nodes = tuple(
            replace(entry, network=_cards_of(slowest, entry.gpus, own.latency_us + slowest.latency_us))
            for entry, own in zip(self.nodes, self.networks, strict=True)
        )
        return replace(self, nodes=nodes, network=None, fabrics=())

    @cached_property
    def hosts(self) -> tuple[str | None, ...]:
        """Slurm's name of each node; ``None`` for nodes whose entry gives no names."""
        names: list[str | None] = []
        for entry in self.nodes:
            names += expand_hostlist(entry.hosts) if entry.hosts else [None] * entry.count
        return tuple(names)

    def find_nodes(self, text: str) -> range | None:
        """Return the numbers of the nodes that a text names: ``h100``, ``h100-0`` or ``h100-0..3``.

        ``None`` if there are no such nodes.
        """
        if text in self.node_numbers:
            return self.node_numbers[text]
        match = _ONE_OR_MANY.fullmatch(text)
        if match is None or match["base"] not in self.node_numbers:
            return None
        numbers = self.node_numbers[match["base"]]
        first, last = int(match["first"]), int(match["last"] or match["first"])
        return numbers[first : last + 1] if first <= last < len(numbers) else None


def _cards_of(link: Network | FabricLink, gpus: int, latency_us: float) -> NodeNetwork:
    """Return the cards of a node with `gpus` GPUs whose owners, the node or its GPUs, have links as given."""
    cards = gpus if link.per == "gpu" else 1
    return NodeNetwork(cards, link.gbit_s, link.bandwidth_gb_s, latency_us)
