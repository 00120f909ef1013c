"""Rules that find machines which are sound alone but do not work together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from packaging.version import Version

from megatron_hexi.doctor.facts import Facts
from megatron_hexi.doctor.problems import Problem, error, values_by_rank, warning
from megatron_hexi.doctor.rules_fleet_network import NETWORK_RULES

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
    return all(
        len({rank_facts.environment.get(name) for rank_facts in facts} - {None}) == 1 for name in names
    ) and all(name in rank_facts.environment for rank_facts in facts for name in names)


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
    for plugin, variable in (
        ("libnccl-net.so", "NCCL_NET_PLUGIN"),
        ("libnccl-tuner.so", "NCCL_TUNER_PLUGIN"),
    ):
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
        gpus = tuple(state.name for state in rank_facts.gpu_states) or tuple(
            gpu.name for gpu in rank_facts.gpus
        )
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
                yield warning(
                    f"{name} differ between nodes of {kind}: {values_by_rank(hosts, values)}", remedy
                )


FLEET_RULES: tuple[FleetRule, ...] = (
    _cpu_vendors,
    _architectures,
    _plugins,
    *NETWORK_RULES,
    _nodes_of_a_kind,
)
