"""Problems with severity, remedy, hosts and ranks, as tables and as plain values for --json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hexi.doctor.facts import Facts, KernelChoice
from megatron_hexi.spelling import spell_numbers

Severity = Literal["error", "warning", "note"]

#: The worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Problem:
    """A problem that the doctor found.

    Attributes:
        severity: ``error``: a job will not start, or be wrong; ``warning``: it will be slow, or fail where
        the
            network is needed; ``note``: worth knowing.
        where: hosts and ranks that have it; empty where there is only this process.
    """

    severity: Severity
    what: str
    remedy: str
    where: str = ""


#: A problem of each severity, with what it is and its remedy.
error, warning, note = (partial(Problem, severity) for severity in SEVERITIES)


def problem_of(severity: Severity, message: str) -> Problem:
    """Return the problem in a message of a `HexiError`, which ends in its remedy: ``place: what; remedy``."""
    what, _, remedy = message.rpartition("; ")
    return Problem(severity, what or message, remedy if what else "see above")


def worst_first(problems: list[Problem]) -> list[Problem]:
    """Return errors, then warnings, then notes; otherwise in the given order."""
    return sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity))


def healthy(problems: list[Problem]) -> bool:
    """Whether no problem is an error."""
    return all(problem.severity != "error" for problem in problems)


def values_by_rank(facts: Sequence[Facts], values: Sequence[str]) -> str:
    """Return values with the ranks that have them: ``2.27.3 on a (rank 0-7); 2.26.2 on b (rank 8)``."""
    groups: dict[str, list[Facts]] = {}
    for rank_facts, value in zip(facts, values, strict=True):
        groups.setdefault(value, []).append(rank_facts)
    return "; ".join(f"{value} on {spell_places(ranks)}" for value, ranks in groups.items())


def spell_places(facts: Sequence[Facts]) -> str:
    """Return hosts with their ranks as text: ``a (rank 0-7), b (rank 8)``."""
    hosts: dict[str, list[int]] = {}
    for rank_facts in facts:
        ranks = hosts.setdefault(rank_facts.host, [])
        if rank_facts.rank is not None:
            ranks.append(rank_facts.rank)
    return ", ".join(
        f"{host} (rank {spell_numbers(ranks)})" if ranks else host for host, ranks in hosts.items()
    )


_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}

#: Packages that are listed even if they are not installed.
_SHOWN = (
    "megatron-hexi",
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "flash-attn",
    "flash-attn-3",
)

#: Variables that always differ between ranks.
_OF_ONE_RANK = ("RANK", "LOCAL_RANK")


def doctor_report(facts: Sequence[Facts], problems: Sequence[Problem]) -> RenderableType:
    """Return problems first, then tables of software, kernels, patches, network and variables."""
    tables = (_software, _kernels, _patches, _network, _environment)
    return Group(*_findings(problems), *(part for table in tables if (part := table(facts)) is not None))


def doctor_dict(facts: Sequence[Facts], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the findings as plain values: ``healthy``, ``problems``, and ``ranks`` with their facts."""
    return {
        "healthy": healthy(list(problems)),
        "problems": [dataclasses.asdict(problem) for problem in problems],
        "ranks": [dataclasses.asdict(rank_facts) for rank_facts in facts],
    }


def _software(facts: Sequence[Facts]) -> Table:
    """Return a row for each library, and a column for each group of ranks with equal versions."""
    kinds: dict[tuple[tuple[str, str], ...], list[Facts]] = {}
    for rank_facts in facts:
        kinds.setdefault(tuple(_installed(rank_facts).items()), []).append(rank_facts)
    table = Table()
    table.add_column("installed", no_wrap=True)
    for ranks in kinds.values():
        table.add_column(Text(spell_places(ranks)), overflow="fold")
    columns = [dict(kind) for kind in kinds]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(Text(column.get(name, "")) for column in columns))
    return table


def _installed(facts: Facts) -> dict[str, str]:
    torch, driver = facts.torch, facts.driver
    versions = {"Python": facts.python}
    for name in _SHOWN:
        package = facts.package(name)
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
    for gpu in facts.gpus:
        kind = f"{gpu.name} {gpu.memory_gib:.0f} GiB"
        kinds[kind] = kinds.get(kind, 0) + 1
    versions["GPUs"] = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
    cpu = facts.cpu
    versions["CPU"] = f"{cpu.model or cpu.vendor or 'not known'}, {cpu.numa_nodes or '?'} NUMA nodes"
    for package in facts.packages:
        if package.name not in versions:
            versions[package.name] = package.version or "not installed"
    return versions


def _kernels(facts: Sequence[Facts]) -> Table | None:
    choices = list(dict.fromkeys(choice for rank_facts in facts for choice in rank_facts.kernels))
    if not choices:
        return None
    # Equal rows become one: first over head sizes, then over types.
    sizes: dict[tuple[str, str, str, str], list[int]] = {}
    for choice in choices:
        key = (choice.device, choice.dtype, choice.kernel, _refusals(choice))
        sizes.setdefault(key, []).append(choice.head_dim)
    rows: dict[tuple[str, tuple[int, ...], str, str], list[str]] = {}
    for (device, dtype, kernel, refusals), heads in sizes.items():
        rows.setdefault((device, tuple(heads), kernel, refusals), []).append(dtype)
    table = Table()
    for name in ("attention on", "type", "head size", "kernel", "and not"):
        table.add_column(name, no_wrap=name == "kernel", overflow="fold")
    for (device, head_dims, kernel, refusals), dtypes in rows.items():
        table.add_row(
            Text(device),
            ", ".join(dtypes),
            ", ".join(map(str, head_dims)),
            kernel,
            Text(refusals),
            end_section=True,
        )
    return table


def _refusals(choice: KernelChoice) -> str:
    """Return why the other kernels are not chosen; kernels with the same reason share a line."""
    reasons: dict[str, list[str]] = {}
    for name, reason in choice.verdicts:
        if name != choice.kernel:
            reasons.setdefault(reason or "slower", []).append(name)
    return "\n".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def _patches(facts: Sequence[Facts]) -> Table | None:
    states = list(dict.fromkeys(patch for rank_facts in facts for patch in rank_facts.patches))
    if not states:
        return None
    versions = dict.fromkeys(rank_facts.package("megatron-core").version or "none" for rank_facts in facts)
    table = Table()
    table.add_column(f"patch of megatron-core {', '.join(versions)}", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("what for", overflow="fold")
    for patch in states:
        style = _STYLES["error"] if patch.state == "does not fit" else ""
        table.add_row(Text(patch.target), Text(patch.state, style), Text(patch.why))
    return table


def _network(facts: Sequence[Facts]) -> Table | None:
    hosts = {rank_facts.host: rank_facts for rank_facts in reversed(facts)}  # one process of each host
    table = Table()
    for name in ("host", "interface", "state", "speed", "addresses"):
        table.add_column(name, overflow="fold")
    for host, rank_facts in reversed(hosts.items()):
        for interface in rank_facts.network.interfaces:
            if interface.up:
                speed = interface.speed_mbit_s
                table.add_row(
                    Text(host),
                    Text(interface.name),
                    "up",
                    "not known" if speed is None else f"{speed / 1000:g} Gb/s",
                    Text(", ".join(interface.addresses)),
                )
        for port in rank_facts.network.infiniband:
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
    for rank_facts in facts:
        for name, value in rank_facts.environment.items():
            if name not in _OF_ONE_RANK:
                values.setdefault((name, value), []).append(rank_facts)
    if not values:
        return None
    table = Table()
    for name in ("variable", "value", "on"):
        table.add_column(name, overflow="fold")
    for (name, value), ranks in sorted(values.items()):
        where = "everywhere" if len(ranks) == len(facts) > 1 else spell_places(ranks)
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
    summary = ", ".join(
        f"{count} {severity}{'' if count == 1 else 's'}" for count, severity in counts if count
    )
    return [Text(f"{'healthy' if healthy(list(problems)) else 'not healthy'}: {summary}"), table]
