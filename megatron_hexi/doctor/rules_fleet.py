"""Rules that find machines which are sound alone but do not work together, and networks between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from packaging.version import Version

from megatron_hexi.doctor.facts import Facts, InfinibandPort, Interface
from megatron_hexi.doctor.findings import Problem, error, values_by_rank, warning
from megatron_hexi.doctor.rules_communication import as_nccl
from megatron_hexi.grouping import grouped

#: Interfaces of containers and virtual machines: they exist on every host and connect none.
_VIRTUAL = ("br-", "cali", "cni", "docker", "flannel", "lo", "podman", "tun", "veth", "virbr", "weave")
_SEVERAL = 2


def _hosts(facts: Sequence[Facts]) -> list[Facts]:
    """Return the facts of one process of each host, without its rank."""
    one_each = {rank_facts.host: replace(rank_facts, rank=None) for rank_facts in facts}
    return list(one_each.values())


def _up(facts: Facts) -> list[InfinibandPort]:
    return [port for port in facts.network.infiniband if port.is_up]


def _fastest(ports: Sequence[InfinibandPort]) -> list[InfinibandPort]:
    best = max((port.gbit_s for port in ports), default=0.0)
    return [port for port in ports if port.gbit_s == best]


def _layers(ports: Sequence[InfinibandPort]) -> set[str]:
    return {port.link_layer for port in ports}


def _names(ports: Sequence[InfinibandPort]) -> str:
    return ",".join(dict.fromkeys(port.device for port in ports))


def _selected_cards(facts: Facts) -> str:
    """Return the cards that NCCL uses: those in NCCL_IB_HCA, or else all."""
    names = dict.fromkeys(port.device for port in _up(facts))
    value = facts.environment.get("NCCL_IB_HCA")
    return ",".join(as_nccl(value, names) if value else names)


def _by_host(hosts: Sequence[Facts], exports: Mapping[str, str]) -> str:
    """Return exports by host, as ``on a, b: export …; on c: export …``."""
    same = grouped((exports[host.host], host.host) for host in hosts)
    return "; ".join(f"on {', '.join(names)}: export {text}" for text, names in same.items())


def _link_layers(facts: Sequence[Facts]) -> Iterator[Problem]:
    """Report hosts with InfiniBand, RoCE or neither, which NCCL cannot connect by itself."""
    hosts = [host for host in _hosts(facts) if host.environment.get("NCCL_IB_DISABLE") != "1"]
    layers = [_layers(_fastest(_up(host))) for host in hosts]
    if len({frozenset(layer_set) for layer_set in layers}) < _SEVERAL:
        return
    common = set.intersection(*(_layers(_up(host)) for host in hosts))
    if common:
        cards = {host.host: [port for port in _up(host) if port.link_layer in common] for host in hosts}
        if all(_selected_cards(host) == _names(_fastest(cards[host.host])) for host in hosts):
            return
        exports = {host: f"NCCL_IB_HCA=={_names(_fastest(ports))}" for host, ports in cards.items()}
        meeting = "cards that all have"
    else:
        names = _common_interfaces(hosts)
        exports = {
            host.host: f"NCCL_IB_DISABLE=1{f' NCCL_SOCKET_IFNAME=={names[host.host].name}' if names else ''}"
            for host in hosts
        }
        meeting = "TCP is what all have"
    spelled = [" and ".join(sorted(layer_set)) or "no RDMA" for layer_set in layers]
    yield error(
        f"link layers differ, and do not meet: {values_by_rank(hosts, spelled)}",
        f"{_by_host(hosts, exports)} ({meeting})",
    )


def _cards(facts: Sequence[Facts]) -> Iterator[Problem]:
    """Find fast cards with other names on other nodes, where NCCL also uses slow ones (NVIDIA/nccl#1277)."""
    hosts = [host for host in _hosts(facts) if _up(host)]
    fast = [_names(_fastest(_up(host))) for host in hosts]
    selected = [_selected_cards(host) for host in hosts]
    if len(set(selected)) > 1 and any(
        host.environment.get("NCCL_IGNORE_NET_MISMATCH") == "1" for host in hosts
    ):
        yield error(
            f"cards differ ({values_by_rank(hosts, selected)}), and NCCL_IGNORE_NET_MISMATCH=1 silences it: "
            "ranks wait for cards that others lack (NVIDIA/nccl#2428)",
            "unset NCCL_IGNORE_NET_MISMATCH on every node, and give each as many cards as the others",
        )
    layers = {frozenset(_layers(_fastest(_up(host)))) for host in hosts}
    if len(set(fast)) < _SEVERAL or selected == fast or len(layers) > 1:
        return  # where layers differ, `_link_layers` says which cards
    exports = {host.host: f"NCCL_IB_HCA=={names}" for host, names in zip(hosts, fast, strict=True)}
    yield warning(
        f"fast cards differ ({values_by_rank(hosts, fast)}), and NCCL takes others too "
        f"({values_by_rank(hosts, selected)}): it hangs or is slow where it pairs them (NVIDIA/nccl#1277)",
        _by_host(hosts, exports),
    )


def _vendors(facts: Sequence[Facts]) -> Iterator[Problem]:
    """Find cards of two vendors, which fail over RoCE until all use one GID index (NVIDIA/nccl#1526)."""
    hosts = [host for host in _hosts(facts) if _up(host)]
    vendors = [", ".join(sorted({port.vendor for port in _fastest(_up(host))} - {""})) for host in hosts]
    if len(set(vendors) - {""}) > 1:
        index = (
            "export NCCL_IB_GID_INDEX=3 on every node (RoCE v2, as show_gids says); then "
            if any("Ethernet" in _layers(_fastest(_up(host))) for host in hosts)
            and not all("NCCL_IB_GID_INDEX" in host.environment for host in hosts)
            else ""
        )
        yield warning(
            f"vendors of network cards differ: {values_by_rank(hosts, vendors)} (PCI numbers; "
            "NVIDIA/nccl#1526)",
            f"{index}test with nccl-tests between the kinds; if that hangs, export NCCL_IB_DISABLE=1 on "
            "every node",
        )


def _merged_ports(facts: Sequence[Facts]) -> Iterator[Problem]:
    """Find cards with ports that NCCL merges on some hosts only (NVIDIA/nccl#1422)."""
    hosts = [host for host in _hosts(facts) if _up(host)]
    ports = [max(Counter(port.device for port in _fastest(_up(host))).values()) for host in hosts]
    if len(set(ports)) > 1 and not all(host.environment.get("NCCL_IB_MERGE_NICS") == "0" for host in hosts):
        values = [f"{count} port{'' if count == 1 else 's'} a card" for count in ports]
        yield warning(
            f"ports of cards differ: {values_by_rank(hosts, values)}; NCCL merges them on some nodes only "
            "(NVIDIA/nccl#1422)",
            "export NCCL_IB_MERGE_NICS=0 on every node",
        )


def _common_interfaces(hosts: Sequence[Facts]) -> dict[str, Interface] | None:
    """Return each host's interface in the fastest common network; ``None`` without a common network."""
    candidates: dict[str, dict[str, Interface]] = {}
    for host in hosts:
        for interface in filter(_joins, host.network.interfaces):
            for network in interface.networks:
                candidates.setdefault(network, {}).setdefault(host.host, interface)

    def slowest(by_host: Mapping[str, Interface]) -> int:
        return min(interface.speed_mbit_s or 0 for interface in by_host.values())

    common = [by_host for by_host in candidates.values() if len(by_host) == len(hosts)]
    return max(common, key=slowest, default=None)


def _joins(interface: Interface) -> bool:
    """Whether an interface may lead to other hosts."""
    return interface.up and bool(interface.networks) and not interface.name.startswith(_VIRTUAL)


def _interfaces(facts: Sequence[Facts]) -> Iterator[Problem]:
    """Find interfaces of one network whose names differ: no name fits all nodes (NVIDIA/nccl#794)."""
    hosts = _hosts(facts)
    common = _common_interfaces(hosts) if len(hosts) >= _SEVERAL else None
    if common is None:
        return
    names = [common[host_facts.host].name for host_facts in hosts]
    # A single interface is used by NCCL and gloo under any name.
    several = any(sum(map(_joins, host_facts.network.interfaces)) > 1 for host_facts in hosts)
    is_set = all("NCCL_SOCKET_IFNAME" in host_facts.environment for host_facts in hosts)
    if len(set(names)) > 1 and several and not is_set:
        exports = {
            host: f"NCCL_SOCKET_IFNAME=={interface.name} GLOO_SOCKET_IFNAME={interface.name}"
            for host, interface in common.items()
        }
        yield warning(
            f"interfaces of the network that all have differ: {values_by_rank(hosts, names)}; NCCL may take "
            "one that others do not reach (NVIDIA/nccl#794)",
            _by_host(hosts, exports),
        )
    packets = {host: i.mtu for host, i in common.items() if i.mtu is not None}
    if len(set(packets.values())) > 1:
        largest = max(packets.values())
        smaller = [
            f"on {host}: ip link set {common[host].name} mtu {largest}"
            for host, mtu in packets.items()
            if mtu < largest
        ]
        sizes = [str(packets.get(host_facts.host, "not known")) for host_facts in hosts]
        yield warning(
            f"MTU differs in the network that all have: {values_by_rank(hosts, sizes)}; large packets are "
            "lost or split",
            f"{'; '.join(smaller)}, as root, if the switches take it",
        )


FleetRule = Callable[[Sequence[Facts]], Iterator[Problem]]

# NCCL's release notes (https://github.com/NVIDIA/nccl/releases): 2.22.3 aligns ranks on the CPU's vendor
# (issues 1136 and 1184), 2.24.3 on a mix of architectures, 2.26.2 harmonises all tuning.
_VENDORS_ALIGNED, _TUNING_ALIGNED = Version("2.22.3"), Version("2.26.2")
_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}


def _older_nccl(facts: Sequence[Facts], than: Version) -> str | None:
    """Return the oldest NCCL of the job if it is older than a version."""
    versions = [Version(f.torch.nccl) for f in facts if f.torch is not None and f.torch.nccl]
    return str(min(versions)) if versions and min(versions) < than else None


def _set_alike(facts: Sequence[Facts], *names: str) -> bool:
    """Whether all ranks have these variables, with the same values."""
    values = [{rank_facts.environment.get(name) for rank_facts in facts} for name in names]
    return all(len(of_ranks) == 1 and None not in of_ranks for of_ranks in values)


def _cpu_vendors(facts: Sequence[Facts]) -> Iterator[Problem]:
    """Find CPUs of two vendors (NVIDIA/nccl#1136): the tuner assumes another network overhead on AMD."""
    vendors = [_VENDORS.get(rank_facts.cpu.vendor, rank_facts.cpu.vendor) for rank_facts in facts]
    nccl = _older_nccl(facts, _VENDORS_ALIGNED)
    if len(set(vendors) - {""}) < 2 or nccl is None or _set_alike(facts, "NCCL_NET_OVERHEAD"):
        return
    yield error(
        f"CPUs differ ({values_by_rank(facts, vendors)}), and NCCL {nccl} chooses algorithms by them: "
        "ranks hang at some sizes (NVIDIA/nccl#1136)",
        f"NCCL {_VENDORS_ALIGNED} or newer; until then export NCCL_NET_OVERHEAD=1000 on every node",
    )


def _architectures(facts: Sequence[Facts]) -> Iterator[Problem]:
    """Find GPUs of two generations, which choose differently (nccl#1184, #1366; notes of 2.24.3, 2.26.2)."""
    gpus = [", ".join(dict.fromkeys(gpu.name for gpu in rank_facts.gpus)) for rank_facts in facts]
    generations = {gpu.capability for rank_facts in facts for gpu in rank_facts.gpus}
    machines = {rank_facts.cpu.machine for rank_facts in facts} - {""}
    nccl = _older_nccl(facts, _TUNING_ALIGNED)
    if (len(generations) < 2 and len(machines) < 2) or nccl is None:
        return
    if _set_alike(facts, "NCCL_ALGO", "NCCL_PROTO"):
        return
    values = gpus if len(generations) > 1 else [rank_facts.cpu.machine for rank_facts in facts]
    yield error(
        f"generations differ ({values_by_rank(facts, values)}), and NCCL {nccl} chooses algorithms by them: "
        "ranks may hang (NVIDIA/nccl#1184)",
        f"NCCL {_TUNING_ALIGNED} or newer; until then export NCCL_ALGO=Ring NCCL_PROTO=Simple on every node",
    )


def _plugins(facts: Sequence[Facts]) -> Iterator[Problem]:
    """Find plugins on some ranks only, which cannot communicate with the others (NVIDIA/nccl#1634)."""
    for kind in ("net", "tuner"):
        plugin, variable = f"libnccl-{kind}.so", f"NCCL_{kind.upper()}_PLUGIN"
        has = ["found" if plugin in rank_facts.nccl_plugins else "missing" for rank_facts in facts]
        if len(set(has)) < 2 or _set_alike(facts, variable):
            continue
        yield error(
            f"NCCL's plugin {plugin} is {values_by_rank(facts, has)}: these ranks hang, or choose "
            "differently",
            f"install it on every node, or export {variable}=none on every node",
        )


def _alike_kinds(facts: Sequence[Facts]) -> Iterator[tuple[str, list[Facts]]]:
    """Yield kinds of hosts with the same GPUs, one process of each; only kinds with several hosts."""
    kinds: dict[tuple[str, ...], dict[str, Facts]] = {}
    for rank_facts in facts:
        gpus = tuple(gpu.name for gpu in rank_facts.gpu_states or rank_facts.gpus)
        if gpus:
            kinds.setdefault(gpus, {}).setdefault(rank_facts.host, replace(rank_facts, rank=None))
    for gpus, hosts in kinds.items():
        if len(hosts) > 1:
            yield f"{len(gpus)} x {gpus[0]}", list(hosts.values())


def _links(facts: Facts) -> str:
    """Return the links between the GPUs of a node, such as ``28 x NV18``."""
    pairs = Counter(link for number, links in enumerate(facts.gpu_links) for link in links[number + 1 :])
    return ", ".join(f"{count} x {link}" for link, count in sorted(pairs.items()))


#: Facts that are equal on nodes of one kind: name, how to read it, and the remedy where it differs.
_OF_A_KIND: tuple[tuple[str, Callable[[Facts], Hashable], str], ...] = (
    (
        "links between GPUs",
        _links,
        "see nvidia-smi nvlink -s and topo -m on the node with fewer; reset its GPUs",
    ),
    (
        "NUMA nodes",
        lambda facts: facts.cpu.numa_nodes,
        "set the firmware alike (NPS, sub-NUMA clustering): NCCL searches other paths otherwise",
    ),
    (
        "ECC",
        lambda facts: _counted("on" if s.ecc else "off" for s in facts.gpu_states if s.ecc is not None),
        "nvidia-smi -e 1 as root where it is off, and restart that node: GPUs have less memory with it",
    ),
    (
        "power limits",
        lambda facts: _counted(f"{s.power_limit_w:g} W" for s in facts.gpu_states if s.power_limit_w),
        "nvidia-smi -pl WATTS as root, alike; or measure the nodes as they are with hexi probe",
    ),
    (
        "clocks",
        lambda facts: _counted(f"{s.max_clock_mhz} MHz" for s in facts.gpu_states if s.max_clock_mhz),
        "nvidia-smi -rgc as root; or measure the nodes as they are with hexi probe",
    ),
)


def _counted(values: Iterable[str]) -> str:
    counts = Counter(value for value in values if value)
    return ", ".join(value if len(counts) == 1 else f"{n} x {value}" for value, n in sorted(counts.items()))


def _nodes_of_a_kind(facts: Sequence[Facts]) -> Iterator[Problem]:
    for kind, hosts in _alike_kinds(facts):
        for name, get, remedy in _OF_A_KIND:
            values = [str(get(host_facts) or "") for host_facts in hosts]
            if len(set(values) - {""}) > 1:
                what = f"{name} differ between nodes of {kind}: {values_by_rank(hosts, values)}"
                yield warning(what, remedy)


FLEET_RULES: tuple[FleetRule, ...] = (
    *(_cpu_vendors, _architectures, _plugins),
    *(_link_layers, _cards, _vendors, _merged_ports, _interfaces),
    _nodes_of_a_kind,
)
