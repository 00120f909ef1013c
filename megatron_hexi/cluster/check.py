"""Check that a cluster file obeys all rules; an error names the place in the file and the remedy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from megatron_hexi.cluster.catalog import unknown_device
from megatron_hexi.cluster.device import Device
from megatron_hexi.cluster.links import Rated, fabric_groups
from megatron_hexi.cluster.model import MAX_GPUS, ClusterFile, Matrix, Network, NetworkLevel, NodeEntry
from megatron_hexi.cluster.schema import refuse
from megatron_hexi.errors import PlatformError
from megatron_hexi.hostlist import expand_hostlist
from megatron_hexi.yaml_file import Place, YamlFile
from megatron_hexi.yaml_schema import short

_EXAMPLE = "{gbit_s: 100, latency_us: 10, per: node}"


def check_network(file: ClusterFile, source: YamlFile) -> None:
    """Check the networks and fabrics of a cluster file, but not its levels and its matrix."""
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


def _check_rate(link: Network | Rated, place: Place, source: YamlFile) -> None:
    if (link.gbit_s is None) == (link.bandwidth_gb_s is None):
        found = "neither gbit_s nor" if link.gbit_s is None else "both gbit_s and"
        remedy = "give the line rate (gbit_s: 400), or what was measured (bandwidth_gb_s: 48)"
        refuse(source, place, f"has {found} bandwidth_gb_s", remedy)


def _check_cards(entry: NodeEntry, place: Place, source: YamlFile) -> None:
    """Refuse cards that the GPUs of a node cannot share evenly."""
    assert entry.network is not None
    cards, gpus = entry.network.cards, entry.gpus
    if max(cards, gpus) % min(cards, gpus):
        even = ", ".join(str(number) for number in range(1, gpus + 1) if gpus % number == 0)
        problem = f"= {cards} cannot be shared evenly by the node's {gpus} GPUs"
        remedy = f"write {even} or a multiple of {gpus}, or describe the node by what it has evenly"
        refuse(source, (*place, "cards"), problem, remedy)


def _check_fabrics(file: ClusterFile, source: YamlFile) -> None:
    names = file.fabric_names
    listed = ", ".join(names)
    for number, link in enumerate(file.fabrics):
        place: Place = ("fabrics", number)
        _check_rate(link, place, source)
        for position, name in enumerate(link.meet or ()):
            if name not in names:
                problem = f"= {short(name)} is no node's fabric"
                known = f"nodes have {listed or 'none'}"
                remedy = f"{known}: name one of them, or say it in a node's network.fabric"
                refuse(source, (*place, "meet", position), problem, remedy)
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


def check_size(file: ClusterFile, source: YamlFile) -> None:
    """Refuse an absurd number of nodes or GPUs, before an object is built for each of them."""
    if file.gpu_count > MAX_GPUS:
        remedy = f"at most {MAX_GPUS} are planned for; correct count or gpus"
        refuse(source, ("nodes",), f"have {file.gpu_count} GPUs in all", remedy)


def with_counted_hosts(file: ClusterFile, source: YamlFile) -> ClusterFile:
    """Return the cluster file with `count` set to the number of hosts in each entry that names hosts."""
    entries = list(file.nodes)
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries):
        if entry.hosts is None:
            continue
        place: Place = ("nodes", number, "hosts")
        value = f"= {short(entry.hosts)}"
        try:
            hosts = expand_hostlist(entry.hosts)
        except PlatformError:
            remedy = "write it as Slurm does: h[01-06], or h01,h02"
            refuse(source, place, f"{value} is no list of hosts", remedy)
        for host in hosts:
            if host in seen:
                problem = f"{value} names {host} again, which nodes[{seen[host]}] has"
                refuse(source, place, problem, "name each host once")
            seen[host] = number
        if entry.count not in (1, len(hosts)):
            problem = f"{value} names {len(hosts)} hosts for count: {entry.count}"
            refuse(source, place, problem, "leave count out, or correct one of them")
        entries[number] = replace(entry, count=len(hosts))
    return replace(file, nodes=tuple(entries))


def check_cluster(file: ClusterFile, devices: Mapping[str, Device], source: YamlFile) -> None:
    """Check that a cluster file obeys all rules."""
    _check_nodes(file, devices, source)
    check_network(file, source)
    if file.matrix is not None:
        _check_matrix(file, file.matrix, source)
    inner = list(range(file.node_count))  # the group of each node one level below: itself
    names = {"node", "network", "cluster", "fabrics"}
    for i, level in enumerate(file.levels):
        if level.name in names:
            problem = f"= {short(level.name)} is taken"
            refuse(source, ("levels", i, "name"), problem, "give every level a name of its own")
        names.add(level.name)
        groups = _check_groups(file, level, ("levels", i, "groups"), source)
        _check_nested(file, inner, groups, ("levels", i, "groups"), source)
        inner = groups


def node_name(file: ClusterFile, number: int) -> str:
    """Return the name, such as ``h100-0``, of the node with a given number in the file."""
    for name, numbers in file.node_numbers.items():
        if number in numbers:
            return f"{name}-{number - numbers.start}"
    raise AssertionError(f"no node {number}")


def _check_nodes(file: ClusterFile, devices: Mapping[str, Device], source: YamlFile) -> None:
    seen: dict[str, int] = {}
    for i, entry in enumerate(file.nodes):
        place: Place = ("nodes", i)
        if entry.name in seen:
            problem = f"= {short(entry.name)} is that of nodes[{seen[entry.name]}]"
            remedy = "give each entry a name of its own, or raise the first one's count"
            refuse(source, (*place, "name"), problem, remedy)
        seen[entry.name] = i
        if entry.gpu not in devices:
            remedy = "correct its name, or describe it under devices:"
            refuse(source, (*place, "gpu"), f"= {unknown_device(entry.gpu, devices)}", remedy)
        if entry.host is not None and devices[entry.gpu].host is None:
            for name, value in vars(entry.host).items():
                if value is None:
                    remedy = f"add it: nothing is known of the host memory beside {entry.gpu}"
                    refuse(source, (*place, "host", name), "is missing", remedy)
    for i, entry in enumerate(file.nodes):
        base, dash, number = entry.name.rpartition("-")
        if dash and number.isdecimal() and base in seen and int(number) < file.nodes[seen[base]].count:
            problem = f"= {short(entry.name)} is what node {number} of nodes[{seen[base]}] is called"
            refuse(source, ("nodes", i, "name"), problem, "choose another")


def _check_groups(file: ClusterFile, level: NetworkLevel, place: Place, source: YamlFile) -> list[int]:
    group_of = [-1] * file.node_count
    for g, texts in enumerate(level.groups):
        for t, text in enumerate(texts):
            for number in _find(file, text, (*place, g, t), source):
                if group_of[number] >= 0:
                    problem = f"= {text} puts {node_name(file, number)} into a group again"
                    refuse(source, (*place, g, t), problem, "name every node once in a level")
                group_of[number] = g
    if -1 in group_of:
        name = node_name(file, group_of.index(-1))
        refuse(source, place, f"leave {name} out", "put every node into a group; alone is fine")
    return group_of


def _check_nested(
    file: ClusterFile, inner: list[int], outer: list[int], place: Place, source: YamlFile
) -> None:
    first_node: dict[int, int] = {}
    for number, group in enumerate(inner):
        joined = first_node.setdefault(group, number)
        if outer[joined] != outer[number]:
            parted = f"{node_name(file, joined)} from {node_name(file, number)}"
            remedy = "let every group be made of whole groups of the level before it"
            refuse(source, place, f"part {parted}, which a level inside joins", remedy)


def _check_matrix(file: ClusterFile, matrix: Matrix, source: YamlFile) -> None:
    listed: set[int] = set()
    for i, text in enumerate(matrix.nodes):
        place: Place = ("matrix", "nodes", i)
        numbers = _find(file, text, place, source)
        if len(numbers) != 1:
            remedy = f"name one: {node_name(file, numbers[0])}"
            refuse(source, place, f"= {text} names {len(numbers)} nodes", remedy)
        if numbers[0] in listed:
            refuse(source, place, f"= {text} has a row already", "name every node once")
        listed.add(numbers[0])
    missing = set(range(file.node_count)) - listed
    if missing:
        name = node_name(file, min(missing))
        refuse(source, ("matrix", "nodes"), f"leave {name} out", "give it a row and a column")
    for field in ("bandwidth_gb_s", "latency_us"):
        _check_square(matrix, field, getattr(matrix, field), source)


def _check_square(
    matrix: Matrix, field: str, rows: tuple[tuple[float | None, ...], ...], source: YamlFile
) -> None:
    place: Place = ("matrix", field)
    size = len(matrix.nodes)
    one_each = "give one for each, in the order of nodes"
    if len(rows) != size:
        refuse(source, place, f"has {len(rows)} rows for {size} nodes", one_each)
    for r, row in enumerate(rows):
        if len(row) != size:
            refuse(source, (*place, r), f"has {len(row)} values for {size} nodes", one_each)
        for c, value in enumerate(row):
            if r != c and (value is None or (field == "bandwidth_gb_s" and value == 0)):
                problem = f"= {value}: {matrix.nodes[r]} cannot send to {matrix.nodes[c]}"
                remedy = "every two nodes must reach each other; measure it again"
                refuse(source, (*place, r, c), problem, remedy)


def _find(file: ClusterFile, text: str, place: Place, source: YamlFile) -> range:
    nodes = file.find_nodes(text)
    if nodes is None:
        names = ", ".join(f"{name}-0..{len(numbers) - 1}" for name, numbers in file.node_numbers.items())
        refuse(source, place, f"= {short(text)} is no node", f"the file has {names}"[:200])
    return nodes
