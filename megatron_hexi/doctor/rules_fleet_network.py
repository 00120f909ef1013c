"""Rules on the network that all machines share, and the variables to export so that NCCL takes it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_hexi.doctor.facts import Facts, InfinibandPort, Interface
from megatron_hexi.doctor.places import who_has_what
from megatron_hexi.doctor.problems import Problem
from megatron_hexi.doctor.rules_communication import as_nccl

#: Interfaces of containers and virtual machines: alike on every host, and joined to none.
_VIRTUAL = ("br-", "cali", "cni", "docker", "flannel", "lo", "podman", "tun", "veth", "virbr", "weave")
_SEVERAL = 2


def _hosts(facts: Sequence[Facts]) -> list[Facts]:
    """One process of each host, without its rank."""
    return [replace(own, rank=None) for own in {own.host: own for own in facts}.values()]


def _rate(port: InfinibandPort) -> float:
    match = re.match(r"(\d+(\.\d+)?) Gb/sec", port.rate)
    return float(match[1]) if match else 0.0


def _up(own: Facts) -> list[InfinibandPort]:
    return [port for port in own.network.infiniband if port.state == "ACTIVE"]


def _fastest(ports: Sequence[InfinibandPort]) -> list[InfinibandPort]:
    best = max(map(_rate, ports), default=0.0)
    return [port for port in ports if _rate(port) == best]


def _layers(ports: Sequence[InfinibandPort]) -> set[str]:
    return {port.link_layer for port in ports}


def _names(ports: Sequence[InfinibandPort]) -> str:
    return ",".join(dict.fromkeys(port.device for port in ports))


def _taken(own: Facts) -> str:
    """The cards that NCCL takes: those that NCCL_IB_HCA names, or else all."""
    cards = [Interface(name, True, None, ()) for name in dict.fromkeys(port.device for port in _up(own))]
    value = own.environment.get("NCCL_IB_HCA")
    return ",".join(as_nccl(value, cards)) if value else _names(_up(own))


def _by_host(hosts: Sequence[Facts], exports: Mapping[str, str]) -> str:
    """``on a, b: export …; on c: export …``."""
    same: dict[str, list[str]] = {}
    for own in hosts:
        same.setdefault(exports[own.host], []).append(own.host)
    return "; ".join(f"on {', '.join(names)}: export {text}" for text, names in same.items())


def _link_layers(facts: Sequence[Facts]) -> Iterator[Problem]:
    """InfiniBand, RoCE and hosts without either do not meet, unless NCCL is told of another way."""
    hosts = [own for own in _hosts(facts) if own.environment.get("NCCL_IB_DISABLE") != "1"]
    layers = [_layers(_fastest(_up(own))) for own in hosts]
    if len({frozenset(one) for one in layers}) < _SEVERAL:
        return
    common = set.intersection(*(_layers(_up(own)) for own in hosts))
    if common:
        cards = {own.host: [port for port in _up(own) if port.link_layer in common] for own in hosts}
        if all(_taken(own) == _names(_fastest(cards[own.host])) for own in hosts):
            return
        exports = {host: f"NCCL_IB_HCA=={_names(_fastest(ports))}" for host, ports in cards.items()}
        meeting = "cards that all have"
    else:
        names = _common_interfaces(hosts)
        exports = {
            own.host: f"NCCL_IB_DISABLE=1{f' NCCL_SOCKET_IFNAME=={names[own.host].name}' if names else ''}"
            for own in hosts
        }
        meeting = "TCP is what all have"
    found = [" and ".join(sorted(one)) or "no RDMA" for one in layers]
    yield Problem(
        "error",
        f"link layers differ, and do not meet: {who_has_what(hosts, found)}",
        f"{_by_host(hosts, exports)} ({meeting})",
    )


def _cards(facts: Sequence[Facts]) -> Iterator[Problem]:
    """NVIDIA/nccl#1277: fast cards have other names on other nodes, and NCCL also takes slow ones."""
    hosts = [own for own in _hosts(facts) if _up(own)]
    fast = [_names(_fastest(_up(own))) for own in hosts]
    taken = [_taken(own) for own in hosts]
    if len(set(taken)) > 1 and any(own.environment.get("NCCL_IGNORE_NET_MISMATCH") == "1" for own in hosts):
        yield Problem(
            "error",
            f"cards differ ({who_has_what(hosts, taken)}), and NCCL_IGNORE_NET_MISMATCH=1 silences it: ranks "
            "wait for cards that others lack (NVIDIA/nccl#2428)",
            "unset NCCL_IGNORE_NET_MISMATCH on every node, and give each as many cards as the others",
        )
    layers = {frozenset(_layers(_fastest(_up(own)))) for own in hosts}
    if len(set(fast)) < _SEVERAL or taken == fast or len(layers) > 1:
        return  # where layers differ, `_link_layers` says which cards
    exports = {own.host: f"NCCL_IB_HCA=={names}" for own, names in zip(hosts, fast, strict=True)}
    yield Problem(
        "warning",
        f"fast cards differ ({who_has_what(hosts, fast)}), and NCCL takes others too "
        f"({who_has_what(hosts, taken)}): it hangs or is slow where it pairs them (NVIDIA/nccl#1277)",
        _by_host(hosts, exports),
    )


def _vendors(facts: Sequence[Facts]) -> Iterator[Problem]:
    hosts = [own for own in _hosts(facts) if _up(own)]
    vendors = [", ".join(sorted({port.vendor for port in _fastest(_up(own))} - {""})) for own in hosts]
    if len(set(vendors) - {""}) > 1:
        yield Problem(
            "warning",
            f"vendors of network cards differ: {who_has_what(hosts, vendors)} (PCI numbers)",
            "test with nccl-tests between the kinds; if that hangs, export NCCL_IB_DISABLE=1 on every node",
        )


def _merged_ports(facts: Sequence[Facts]) -> Iterator[Problem]:
    """NVIDIA/nccl#1422: NCCL merges the ports of a card on one host, and the other has none to merge."""
    hosts = [own for own in _hosts(facts) if _up(own)]
    ports = [max(Counter(port.device for port in _fastest(_up(own))).values()) for own in hosts]
    if len(set(ports)) > 1 and not all(own.environment.get("NCCL_IB_MERGE_NICS") == "0" for own in hosts):
        values = [f"{count} port{'' if count == 1 else 's'} a card" for count in ports]
        yield Problem(
            "warning",
            f"ports of cards differ: {who_has_what(hosts, values)}; NCCL merges them on some nodes only "
            "(NVIDIA/nccl#1422)",
            "export NCCL_IB_MERGE_NICS=0 on every node",
        )


def _common_interfaces(hosts: Sequence[Facts]) -> dict[str, Interface] | None:
    """Each host's interface in the fastest network that all have; ``None`` where there is no such network."""
    candidates: dict[str, dict[str, Interface]] = {}
    for own in hosts:
        for interface in own.network.interfaces:
            if _joins(interface):
                for network in interface.networks:
                    candidates.setdefault(network, {}).setdefault(own.host, interface)
    common = [found for found in candidates.values() if len(found) == len(hosts)]
    return max(common, key=_slowest, default=None)


def _joins(interface: Interface) -> bool:
    """Whether an interface may lead to other hosts."""
    return interface.up and bool(interface.networks) and not interface.name.startswith(_VIRTUAL)


def _slowest(found: Mapping[str, Interface]) -> int:
    return min(interface.speed_mbit_s or 0 for interface in found.values())


def _interfaces(facts: Sequence[Facts]) -> Iterator[Problem]:
    """NVIDIA/nccl#794: interfaces of one network have other names, and one name does not fit all nodes."""
    hosts = _hosts(facts)
    found = _common_interfaces(hosts) if len(hosts) >= _SEVERAL else None
    if found is None:
        return
    names = [found[own.host].name for own in hosts]
    # Where there is one interface only, NCCL and gloo take it, whatever its name.
    several = any(sum(map(_joins, own.network.interfaces)) > 1 for own in hosts)
    told = all("NCCL_SOCKET_IFNAME" in own.environment for own in hosts)
    if len(set(names)) > 1 and several and not told:
        exports = {
            host: f"NCCL_SOCKET_IFNAME=={one.name} GLOO_SOCKET_IFNAME={one.name}"
            for host, one in found.items()
        }
        yield Problem(
            "warning",
            f"interfaces of the network that all have differ: {who_has_what(hosts, names)}; NCCL may take "
            "one that others do not reach (NVIDIA/nccl#794)",
            _by_host(hosts, exports),
        )
    packets = {host: one.mtu for host, one in found.items() if one.mtu is not None}
    if len(set(packets.values())) > 1:
        largest = max(packets.values())
        smaller = [
            f"on {host}: ip link set {found[host].name} mtu {largest}"
            for host, mtu in packets.items()
            if mtu < largest
        ]
        sizes = [str(packets.get(own.host, "not known")) for own in hosts]
        yield Problem(
            "warning",
            f"MTU differs in the network that all have: {who_has_what(hosts, sizes)}; large packets are lost "
            "or split",
            f"{'; '.join(smaller)}, as root, if the switches take it",
        )


NETWORK_RULES = (_link_layers, _cards, _vendors, _merged_ports, _interfaces)
