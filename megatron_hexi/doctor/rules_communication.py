"""Rules about network, limits and variables that make ranks hang, fail or run slowly."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_hexi.doctor.facts import Facts, Interface
from megatron_hexi.doctor.findings import Problem, error, note, warning

#: Size of /dev/shm below which data loaders and NCCL's buffers run out; Docker's default is 0.0625.
_SHARED_MEMORY_GIB = 1.0

#: Variables and values that turn off something that a job needs, with the effect.
_SLOW = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node exchange through the host's memory",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of a node exchange through the network card",
    ("CUDA_LAUNCH_BLOCKING", "1"): "nothing on a GPU overlaps",
    ("NCCL_LAUNCH_MODE", "GROUP"): "messages wait for each other",
}

#: Variables that name a file.
_FILES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE")

#: Compute capability from which Megatron no longer asks for CUDA_DEVICE_MAX_CONNECTIONS=1 (Blackwell).
_BLACKWELL = 10


def _connections(facts: Facts) -> Iterator[Problem]:
    """Report another value than 1: Megatron then stops with tensor or context parallelism."""
    value = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value in (None, "1") or (facts.gpus and all(gpu.capability[0] >= _BLACKWELL for gpu in facts.gpus)):
        return
    yield error(
        f"CUDA_DEVICE_MAX_CONNECTIONS={value}: Megatron stops with tensor or context parallelism, "
        "on GPUs before Blackwell",
        "unset it (a plan sets it to 1)",
    )


def _interface_names(facts: Facts) -> Iterator[Problem]:
    interfaces = facts.network.interfaces
    if not interfaces:
        return
    usable = [interface.name for interface in interfaces if _usable(interface)]
    choices = f"those that are up and have an address: {', '.join(usable) or 'none'}"
    for variable, select in (("NCCL_SOCKET_IFNAME", as_nccl), ("GLOO_SOCKET_IFNAME", _as_gloo)):
        value = facts.environment.get(variable)
        if value and not any(name in usable or name == "lo" for name in select(value, interfaces)):
            yield error(
                f"{variable}={value} names no interface of this machine that can be used",
                f"name one of {choices}",
            )


def as_nccl(value: str, interfaces: Sequence[Interface]) -> list[str]:
    """Return the interfaces that NCCL selects by prefix; ``^`` excludes, then ``=`` means whole names."""
    excludes, names = value.startswith("^"), value.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")
    parts = [part.partition(":")[0] for part in names.split(",") if part]  # "mlx5_0:1": a port of a card
    return [
        interface.name
        for interface in interfaces
        if excludes
        != any(interface.name == part if exact else interface.name.startswith(part) for part in parts)
    ]


def _as_gloo(value: str, interfaces: Sequence[Interface]) -> list[str]:
    """Return the interfaces that gloo selects, by whole names."""
    return [interface.name for interface in interfaces if interface.name in value.split(",")]


def _cards(facts: Facts) -> Iterator[Problem]:
    ports = facts.network.infiniband
    value = facts.environment.get("NCCL_IB_HCA")
    if value:
        cards = [Interface(port.device, True, None, ()) for port in ports]
        if not as_nccl(value, cards):
            devices = ", ".join(sorted({port.device for port in ports})) or "none"
            yield warning(
                f"NCCL_IB_HCA={value} names no InfiniBand device of this machine; NCCL falls back to TCP",
                f"name one of those found ({devices}), or unset it",
            )
    for port in ports:
        if port.state != "ACTIVE":
            yield warning(
                f"port {port.port} of {port.device} is {port.state}",
                "check cable and subnet manager (ibstat), or leave it out of NCCL_IB_HCA",
            )
    if facts.environment.get("NCCL_IB_DISABLE") == "1" and any(port.state == "ACTIVE" for port in ports):
        yield warning(
            "NCCL_IB_DISABLE=1: nodes exchange by TCP, though InfiniBand is here and up",
            "unset NCCL_IB_DISABLE",
        )
    if ports and facts.limits.locked_memory_gib is not None:
        yield warning(
            f"only {facts.limits.locked_memory_gib:g} GiB may be locked, and InfiniBand locks its buffers",
            "ulimit -l unlimited; in a container --ulimit memlock=-1",
        )


def _slow_variables(facts: Facts) -> Iterator[Problem]:
    for (variable, value), effect in _SLOW.items():
        if facts.environment.get(variable, "").upper() == value:
            yield warning(f"{variable}={value}: {effect}", f"unset {variable}")


def _missing_files(facts: Facts) -> Iterator[Problem]:
    for variable in _FILES:
        value = facts.environment.get(variable)
        if value and not Path(value).is_file():
            yield error(
                f"{variable}={value}: there is no such file",
                f"mount it into the container, or unset {variable}",
            )


def _debugging(facts: Facts) -> Iterator[Problem]:
    level = facts.environment.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE"):
        yield note(f"NCCL_DEBUG={level}: logs grow, and TRACE slows down", "unset it once NCCL works")


def _only_loopback(facts: Facts) -> Iterator[Problem]:
    if facts.network.interfaces and not any(map(_usable, facts.network.interfaces)):
        yield warning(
            "no network interface but the loopback is up and has an address: no other node can be reached",
            "bring one up; in a container start with --network host",
        )


def _name_is_loopback(facts: Facts) -> Iterator[Problem]:
    """Report a name of the machine that is not its network address: gloo listens at that address."""
    addresses = [ipaddress.ip_address(address) for address in facts.network.host_addresses]
    if "GLOO_SOCKET_IFNAME" in facts.environment or not facts.network.interfaces:
        return
    if not addresses or all(address.is_loopback for address in addresses):
        points = "no address" if not addresses else ", ".join(facts.network.host_addresses)
        usable = [interface.name for interface in facts.network.interfaces if _usable(interface)]
        # Within one node this is right; with several nodes gloo fails.
        several = facts.environment.get("WORLD_SIZE") != facts.environment.get("LOCAL_WORLD_SIZE")
        yield Problem(
            "warning" if several else "note",
            f"the machine's name {facts.host} stands for {points}: gloo is reached from this node alone",
            f"for jobs over several nodes set GLOO_SOCKET_IFNAME={usable[0] if usable else 'INTERFACE'}",
        )


def _shared_memory(facts: Facts) -> Iterator[Problem]:
    size = facts.limits.shared_memory_gib
    if size is not None and size < _SHARED_MEMORY_GIB:
        yield warning(
            f"/dev/shm holds {size * 1024:.0f} MiB: NCCL and data loaders need more",
            "start the container with --ipc=host or --shm-size=16g",
        )


def _usable(interface: Interface) -> bool:
    return interface.up and any(
        not (ipaddress.ip_address(address).is_loopback or ipaddress.ip_address(address).is_link_local)
        for address in interface.addresses
    )


COMMUNICATION_RULES = (
    _connections,
    _interface_names,
    _cards,
    _slow_variables,
    _missing_files,
    _debugging,
    _only_loopback,
    _name_is_loopback,
    _shared_memory,
)
