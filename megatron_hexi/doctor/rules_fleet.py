"""Rules that find machines which are sound alone and do not go together: from facts of all to problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from packaging.version import Version

from megatron_hexi.doctor.facts import Facts
from megatron_hexi.doctor.places import who_has_what
from megatron_hexi.doctor.problems import Problem
from megatron_hexi.doctor.rules_fleet_network import NETWORK_RULES

FleetRule = Callable[[Sequence[Facts]], Iterator[Problem]]

# NCCL's release notes (https://github.com/NVIDIA/nccl/releases): 2.22.3 aligns ranks on the CPU's vendor
# (issues 1136 and 1184), 2.24.3 on a mix of architectures, 2.26.2 harmonises all tuning.
_VENDORS_ALIGNED, _TUNING_ALIGNED = Version("2.22.3"), Version("2.26.2")
_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}


def _older_nccl(facts: Sequence[Facts], than: Version) -> str | None:
    """The oldest NCCL of the job where it is older than that."""
    found = [Version(own.torch.nccl) for own in facts if own.torch is not None and own.torch.nccl]
    return str(min(found)) if found and min(found) < than else None


def _set_alike(facts: Sequence[Facts], *names: str) -> bool:
    """Whether all ranks have these variables, with the same values."""
    return all(len({own.environment.get(name) for own in facts} - {None}) == 1 for name in names) and all(
        name in own.environment for own in facts for name in names
    )


def _cpu_vendors(facts: Sequence[Facts]) -> Iterator[Problem]:
    """NVIDIA/nccl#1136: the tuner counts another network overhead on AMD, so ranks choose differently."""
    vendors = [_VENDORS.get(own.cpu.vendor, own.cpu.vendor) for own in facts]
    nccl = _older_nccl(facts, _VENDORS_ALIGNED)
    if len(set(vendors) - {""}) < 2 or nccl is None or _set_alike(facts, "NCCL_NET_OVERHEAD"):
        return
    yield Problem(
        "error",
        f"CPUs differ ({who_has_what(facts, vendors)}), and NCCL {nccl} chooses algorithms by them: "
        "ranks hang at some sizes (NVIDIA/nccl#1136)",
        f"NCCL {_VENDORS_ALIGNED} or newer; until then export NCCL_NET_OVERHEAD=1000 on every node",
    )


def _architectures(facts: Sequence[Facts]) -> Iterator[Problem]:
    """NVIDIA/nccl#1184 and the notes of 2.24.3 and 2.26.2: so do other generations of GPU or CPU."""
    gpus = [", ".join(dict.fromkeys(gpu.name for gpu in own.gpus)) for own in facts]
    generations = {gpu.capability for own in facts for gpu in own.gpus}
    machines = {own.cpu.machine for own in facts} - {""}
    nccl = _older_nccl(facts, _TUNING_ALIGNED)
    if (len(generations) < 2 and len(machines) < 2) or nccl is None:
        return
    if _set_alike(facts, "NCCL_ALGO", "NCCL_PROTO"):
        return
    values = gpus if len(generations) > 1 else [own.cpu.machine for own in facts]
    yield Problem(
        "error",
        f"generations differ ({who_has_what(facts, values)}), and NCCL {nccl} chooses algorithms by them: "
        "ranks may hang (NVIDIA/nccl#1184)",
        f"NCCL {_TUNING_ALIGNED} or newer; until then export NCCL_ALGO=Ring NCCL_PROTO=Simple on every node",
    )


def _plugins(facts: Sequence[Facts]) -> Iterator[Problem]:
    """NVIDIA/nccl#1634: a rank with a network plugin does not talk to one without."""
    for plugin, variable in (
        ("libnccl-net.so", "NCCL_NET_PLUGIN"),
        ("libnccl-tuner.so", "NCCL_TUNER_PLUGIN"),
    ):
        has = ["found" if plugin in own.nccl_plugins else "missing" for own in facts]
        if len(set(has)) < 2 or _set_alike(facts, variable):
            continue
        yield Problem(
            "error",
            f"NCCL's plugin {plugin} is {who_has_what(facts, has)}: these ranks hang, or choose differently",
            f"install it on every node, or export {variable}=none on every node",
        )


def _alike_kinds(facts: Sequence[Facts]) -> Iterator[tuple[str, list[Facts]]]:
    """Hosts with the same GPUs, one process of each; only kinds of which there are several."""
    kinds: dict[tuple[str, ...], dict[str, Facts]] = {}
    for own in facts:
        gpus = tuple(state.name for state in own.gpu_states) or tuple(gpu.name for gpu in own.gpus)
        if gpus:
            kinds.setdefault(gpus, {}).setdefault(own.host, replace(own, rank=None))
    for gpus, hosts in kinds.items():
        if len(hosts) > 1:
            yield f"{len(gpus)} x {gpus[0]}", list(hosts.values())


def _links(own: Facts) -> str:
    """Return the links between the GPUs of a node: ``28 x NV18``."""
    pairs = Counter(link for number, state in enumerate(own.gpu_states) for link in state.links[number + 1 :])
    return ", ".join(f"{count} x {link}" for link, count in sorted(pairs.items()))


#: What nodes of one kind have alike: what it is, how it is read, and the remedy where it differs.
_OF_A_KIND: tuple[tuple[str, Callable[[Facts], Hashable], str], ...] = (
    (
        "links between GPUs",
        _links,
        "see nvidia-smi nvlink -s and topo -m on the node with fewer; reset its GPUs",
    ),
    (
        "NUMA nodes",
        lambda own: own.cpu.numa_nodes,
        "set the firmware alike (NPS, sub-NUMA clustering): NCCL searches other paths otherwise",
    ),
    (
        "ECC",
        lambda own: _counted("on" if one.ecc else "off" for one in own.gpu_states if one.ecc is not None),
        "nvidia-smi -e 1 as root where it is off, and restart that node: GPUs have less memory with it",
    ),
    (
        "power limits",
        lambda own: _counted(f"{one.power_limit_w:g} W" for one in own.gpu_states if one.power_limit_w),
        "nvidia-smi -pl WATTS as root, alike; or measure the nodes as they are with hexi probe",
    ),
    (
        "clocks",
        lambda own: _counted(f"{one.max_clock_mhz} MHz" for one in own.gpu_states if one.max_clock_mhz),
        "nvidia-smi -rgc as root; or measure the nodes as they are with hexi probe",
    ),
)


def _counted(values: Iterable[str]) -> str:
    counts = Counter(value for value in values if value)
    return ", ".join(value if len(counts) == 1 else f"{n} x {value}" for value, n in sorted(counts.items()))


def _nodes_of_a_kind(facts: Sequence[Facts]) -> Iterator[Problem]:
    for kind, hosts in _alike_kinds(facts):
        for what, get, remedy in _OF_A_KIND:
            values = [str(get(own) or "") for own in hosts]
            if len(set(values) - {""}) > 1:
                yield Problem(
                    "warning",
                    f"{what} differ between nodes of {kind}: {who_has_what(hosts, values)}",
                    remedy,
                )


FLEET_RULES: tuple[FleetRule, ...] = (
    _cpu_vendors,
    _architectures,
    _plugins,
    *NETWORK_RULES,
    _nodes_of_a_kind,
)
