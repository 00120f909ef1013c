"""Check networks and fabrics of a cluster file: any two nodes are connected, and described only once."""

from __future__ import annotations

import itertools

from megatron_hexi.cluster.model import ClusterFile, FabricLink, Network, NetworkLevel, NodeEntry, NodeNetwork
from megatron_hexi.cluster.schema import refuse
from megatron_hexi.cluster.tiers import fabric_groups
from megatron_hexi.yaml_file import Place, YamlFile
from megatron_hexi.yaml_schema import short

_EXAMPLE = "{gbit_s: 100, latency_us: 10, per: node}"


def check_network(file: ClusterFile, source: YamlFile) -> None:
    """Check the networks and fabrics of a cluster file, but not its levels and its matrix.

    Raises:
        ClusterError: a rule is broken; the message names the first such rule.
    """
    if file.matrix is not None:
        for field in ("network", "fabrics", "levels"):
            if getattr(file, field):
                refuse(source, (field,), "stands beside a measured matrix", "keep one of the two")
    if file.network is not None:
        _check_rate(file.network, ("network",), source)
    for number, level in enumerate(file.levels):
        _check_rate(level, ("levels", number), source)
    for number, entry in enumerate(file.nodes):
        place: Place = ("nodes", number, "network")
        if entry.network is not None:
            if file.matrix is not None:
                refuse(source, place, "stands beside a measured matrix", "keep one of the two")
            _check_rate(entry.network, place, source)
            _check_cards(entry, place, source)
        elif file.network is None and file.matrix is None and file.node_count > 1:
            if not file.networks:
                problem = f"is missing: the {file.node_count} nodes cannot reach each other"
                refuse(source, ("network",), problem, f"add it: {_EXAMPLE}")
            remedy = f"add it: {{cards: …, gbit_s: …}}, or network: {_EXAMPLE} for all nodes without"
            refuse(source, place, f"is missing: nothing says how {entry.name} reaches other nodes", remedy)
    _check_fabrics(file, source)


def _check_rate(
    link: Network | NodeNetwork | FabricLink | NetworkLevel, place: Place, source: YamlFile
) -> None:
    if (link.gbit_s is None) == (link.bandwidth_gb_s is None):
        found = (
            "has neither gbit_s nor bandwidth_gb_s"
            if link.gbit_s is None
            else "has both gbit_s and bandwidth_gb_s"
        )
        refuse(
            source,
            place,
            found,
            "give the line rate (gbit_s: 400), or what was measured (bandwidth_gb_s: 48)",
        )


def _check_cards(entry: NodeEntry, place: Place, source: YamlFile) -> None:
    """Refuse cards that the GPUs of a node cannot share evenly."""
    assert entry.network is not None
    cards, gpus = entry.network.cards, entry.gpus
    if max(cards, gpus) % min(cards, gpus):
        even = [str(number) for number in range(1, gpus + 1) if gpus % number == 0]
        refuse(
            source,
            (*place, "cards"),
            f"= {cards} cannot be shared evenly by the node's {gpus} GPUs",
            f"write {', '.join(even)} or a multiple of {gpus}, or describe the node by what it has evenly",
        )


def _check_fabrics(file: ClusterFile, source: YamlFile) -> None:
    names = file.fabric_names
    listed = ", ".join(names)
    for number, link in enumerate(file.fabrics):
        place: Place = ("fabrics", number)
        _check_rate(link, place, source)
        for position, name in enumerate(link.meet or ()):
            if name not in names:
                remedy = (
                    f"nodes have {listed or 'none'}: name one of them, or say it in a node's network.fabric"
                )
                refuse(source, (*place, "meet", position), f"= {short(name)} is no node's fabric", remedy)
    if file.fabrics and len(names) < 2:
        refuse(source, ("fabrics",), "join nothing: all nodes are in one fabric", "remove them")
    if len(names) < 2:
        return
    if file.levels:
        remedy = "describe fabrics as the first level, with a group for each, and leave network.fabric out"
        refuse(source, ("levels",), f"stand beside several fabrics ({listed})", remedy)
    groups = fabric_groups(file)
    for number, (before, after) in enumerate(itertools.pairwise(groups)):
        if before == after:
            refuse(source, ("fabrics", number), "joins fabrics that an earlier entry joined", "remove it")
    here, reached = names[0], groups[-1][0]
    apart = dict(zip(groups[-1], groups[0], strict=True))  # a fabric of each group, by number
    for group, fabric in apart.items():
        if group != reached:
            problem = "leave nodes apart" if file.fabrics else "is missing"
            remedy = f"add how they meet: [{{meet: [{here}, {names[fabric]}], gbit_s: 100, per: node}}]"
            problem += f": nodes in {here} and {names[fabric]} cannot reach each other"
            refuse(source, ("fabrics",), problem, remedy)
