"""What the doctor found, as tables for a terminal and as plain values for --json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.doctor.facts import Facts, KernelChoice
from megatron_hexi.doctor.places import spell_places
from megatron_hexi.doctor.problems import SEVERITIES, Problem, healthy

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}

#: Shown by name where they are not installed, too.
_SHOWN = (
    "megatron-hexi",
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "flash-attn",
    "flash-attn-3",
)

#: Variables that differ from rank to rank by their nature.
_OF_ONE_RANK = ("RANK", "LOCAL_RANK")


def doctor_report(facts: Sequence[Facts], problems: Sequence[Problem]) -> RenderableType:
    """All of it: what is wrong, first; then software, kernels, patches, network, variables.

    Args:
        facts: of the ranks that answered, in rank order.
        problems: what is wrong, the worst first.
    """
    tables = (_software, _kernels, _patches, _network, _environment)
    return Group(*_findings(problems), *(part for table in tables if (part := table(facts)) is not None))


def doctor_dict(facts: Sequence[Facts], problems: Sequence[Problem]) -> dict[str, Any]:
    """The same as plain values: ``healthy``, ``problems``, and ``ranks`` with the facts of each."""
    return {
        "healthy": healthy(list(problems)),
        "problems": [dataclasses.asdict(problem) for problem in problems],
        "ranks": [dataclasses.asdict(own) for own in facts],
    }


def _software(facts: Sequence[Facts]) -> Table:
    """A row a library, a column for each group of ranks that have the same of everything."""
    kinds: dict[tuple[tuple[str, str], ...], list[Facts]] = {}
    for own in facts:
        kinds.setdefault(tuple(_installed(own).items()), []).append(own)
    table = Table()
    table.add_column("installed", no_wrap=True)
    for those in kinds.values():
        table.add_column(Text(spell_places(those)), overflow="fold")
    columns = [dict(kind) for kind in kinds]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(Text(column.get(name, "")) for column in columns))
    return table


def _installed(own: Facts) -> dict[str, str]:
    torch, driver = own.torch, own.driver
    versions = {"Python": own.python}
    for name in _SHOWN:
        package = own.package(name)
        state = package.version or "not installed"
        versions[name] = f"{state}, broken" if package.broken else state
        if name == "torch" and torch is not None:
            versions["  CUDA"] = torch.cuda or "built without"
            versions["  cuDNN"] = torch.cudnn or "none"
            versions["  NCCL"] = torch.nccl or "none"
    versions["NVIDIA driver"] = driver.version or "none"
    if driver.cuda is not None:
        versions["NVIDIA driver"] += f" (up to CUDA {driver.cuda})"
    kinds: dict[str, int] = {}
    for gpu in own.gpus:
        kind = f"{gpu.name} {gpu.memory_gib:.0f} GiB"
        kinds[kind] = kinds.get(kind, 0) + 1
    versions["GPUs"] = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
    cpu = own.cpu
    versions["CPU"] = f"{cpu.model or cpu.vendor or 'not known'}, {cpu.numa_nodes or '?'} NUMA nodes"
    for package in own.packages:
        if package.name not in versions:
            versions[package.name] = package.version or "not installed"
    return versions


def _kernels(facts: Sequence[Facts]) -> Table | None:
    choices = list(dict.fromkeys(choice for own in facts for choice in own.kernels))
    if not choices:
        return None
    # Rows that say the same become one: first over head sizes, then over types.
    sizes: dict[tuple[str, str, str, str], list[int]] = {}
    for choice in choices:
        key = (choice.device, choice.dtype, choice.kernel, _others(choice))
        sizes.setdefault(key, []).append(choice.head_dim)
    rows: dict[tuple[str, tuple[int, ...], str, str], list[str]] = {}
    for (device, dtype, kernel, others), heads in sizes.items():
        rows.setdefault((device, tuple(heads), kernel, others), []).append(dtype)
    table = Table()
    for name in ("attention on", "type", "head size", "kernel", "and not"):
        table.add_column(name, no_wrap=name == "kernel", overflow="fold")
    for (device, head_dims, kernel, others), dtypes in rows.items():
        table.add_row(
            Text(device),
            ", ".join(dtypes),
            ", ".join(map(str, head_dims)),
            kernel,
            Text(others),
            end_section=True,
        )
    return table


def _others(choice: KernelChoice) -> str:
    """Why each of the other kernels is not the one; a reason that several share is said once."""
    reasons: dict[str, list[str]] = {}
    for name, reason in choice.verdicts:
        if name != choice.kernel:
            reasons.setdefault(reason or "slower", []).append(name)
    return "\n".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def _patches(facts: Sequence[Facts]) -> Table | None:
    states = list(dict.fromkeys(patch for own in facts for patch in own.patches))
    if not states:
        return None
    versions = dict.fromkeys(own.package("megatron-core").version or "none" for own in facts)
    table = Table()
    table.add_column(f"patch of megatron-core {', '.join(versions)}", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("what for", overflow="fold")
    for patch in states:
        style = _STYLES["error"] if patch.state == "does not fit" else ""
        table.add_row(Text(patch.target), Text(patch.state, style), Text(patch.why))
    return table


def _network(facts: Sequence[Facts]) -> Table | None:
    hosts = {own.host: own for own in reversed(facts)}  # one process of each host
    table = Table()
    for name in ("host", "interface", "state", "speed", "addresses"):
        table.add_column(name, overflow="fold")
    for host, own in reversed(hosts.items()):
        for interface in own.network.interfaces:
            if interface.up:
                speed = interface.speed_mbit_s
                table.add_row(
                    Text(host),
                    Text(interface.name),
                    "up",
                    "not known" if speed is None else f"{speed / 1000:g} Gb/s",
                    Text(", ".join(interface.addresses)),
                )
        for port in own.network.infiniband:
            table.add_row(
                Text(host),
                Text(f"{port.device}:{port.port}"),
                Text(port.state.lower()),
                Text(port.rate),
                Text(port.link_layer),
            )
    return table if table.rows else None


def _environment(facts: Sequence[Facts]) -> Table | None:
    values: dict[tuple[str, str], list[Facts]] = {}
    for own in facts:
        for name, value in own.environment.items():
            if name not in _OF_ONE_RANK:
                values.setdefault((name, value), []).append(own)
    if not values:
        return None
    table = Table()
    for name in ("variable", "value", "on"):
        table.add_column(name, overflow="fold")
    for (name, value), those in sorted(values.items()):
        where = "everywhere" if len(those) == len(facts) > 1 else spell_places(those)
        table.add_row(Text(name), Text(value), Text(where))
    return table


def _findings(problems: Sequence[Problem]) -> list[RenderableType]:
    if not problems:
        return [Text("healthy: nothing found")]
    placed = any(problem.where for problem in problems)
    table = Table()
    table.add_column("", no_wrap=True)
    for name in (*(["on"] if placed else []), "what", "what to do"):
        table.add_column(name, overflow="fold")
    for problem in problems:
        where = [Text(problem.where)] if placed else []
        severity = Text(problem.severity, _STYLES[problem.severity])
        table.add_row(severity, *where, Text(problem.what), Text(problem.remedy), end_section=True)
    counts = [
        (sum(problem.severity == severity for problem in problems), severity) for severity in SEVERITIES
    ]
    said = ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for count, severity in counts if count)
    return [Text(f"{'healthy' if healthy(list(problems)) else 'not healthy'}: {said}"), table]
