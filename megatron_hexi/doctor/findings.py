"""Problems with severity, remedy, hosts and ranks, as tables and as plain values for --json."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from megatron_hexi.doctor.facts import Facts, KernelChoice
from megatron_hexi.grouping import grouped
from megatron_hexi.spelling import spell_numbers

Severity = Literal["error", "warning", "note"]

#: The worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Problem:
    """A problem that the doctor found.

    Attributes:
        severity: ``error``: a job will not start, or be wrong; ``warning``: it will be slow, or fail where
            the network is needed; ``note``: worth knowing.
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


def worst_first(problems: Sequence[Problem]) -> list[Problem]:
    """Return errors, then warnings, then notes; otherwise in the given order."""
    return sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity))


def healthy(problems: Sequence[Problem]) -> bool:
    """Whether no problem is an error."""
    return all(problem.severity != "error" for problem in problems)


def values_by_rank(facts: Sequence[Facts], values: Sequence[str]) -> str:
    """Return values with the ranks that have them: ``2.27.3 on a (rank 0-7); 2.26.2 on b (rank 8)``."""
    groups = grouped(zip(values, facts, strict=True))
    return "; ".join(f"{value} on {spell_places(ranks)}" for value, ranks in groups.items())


def spell_places(facts: Sequence[Facts]) -> str:
    """Return hosts with their ranks as text: ``a (rank 0-7), b (rank 8)``."""
    places = []
    for host, here in grouped((rank_facts.host, rank_facts.rank) for rank_facts in facts).items():
        ranks = [rank for rank in here if rank is not None]
        places.append(f"{host} (rank {spell_numbers(ranks)})" if ranks else host)
    return ", ".join(places)


_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}

#: Packages that are listed even if they are not installed.
_SHOWN = (
    *("megatron-hexi", "torch", "megatron-core"),
    *("transformer-engine", "apex", "flash-attn", "flash-attn-3"),
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
        "healthy": healthy(problems),
        "problems": [dataclasses.asdict(problem) for problem in problems],
        "ranks": [dataclasses.asdict(rank_facts) for rank_facts in facts],
    }


def _folding(*headers: str | Text) -> list[Column]:
    """Return columns of a table that break long texts."""
    return [Column(header, overflow="fold") for header in headers]


def _software(facts: Sequence[Facts]) -> Table:
    """Return a row for each library, and a column for each group of ranks with equal versions."""
    kinds = grouped((tuple(_installed(rank_facts).items()), rank_facts) for rank_facts in facts)
    places = (Text(spell_places(ranks)) for ranks in kinds.values())
    table = Table(Column("installed", no_wrap=True), *_folding(*places))
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
    kinds = Counter(f"{gpu.name} {gpu.memory_gib:.0f} GiB" for gpu in facts.gpus)
    versions["GPUs"] = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
    cpu = facts.cpu
    versions["CPU"] = f"{cpu.model or cpu.vendor or 'not known'}, {cpu.numa_nodes or '?'} NUMA nodes"
    for package in facts.packages:
        versions.setdefault(package.name, package.version or "not installed")
    return versions


def _kernels(facts: Sequence[Facts]) -> Table | None:
    choices = list(dict.fromkeys(choice for rank_facts in facts for choice in rank_facts.kernels))
    if not choices:
        return None
    # Equal rows become one: first over head sizes, then over types.
    sizes = grouped(
        ((choice.device, choice.dtype, choice.kernel, _refusals(choice)), str(choice.head_dim))
        for choice in choices
    )
    rows = grouped(
        ((device, ", ".join(heads), kernel, refusals), dtype)
        for (device, dtype, kernel, refusals), heads in sizes.items()
    )
    table = Table(*_folding("attention on", "type", "head size", "kernel", "and not"))
    table.columns[3].no_wrap = True
    for (device, heads, kernel, refusals), dtypes in rows.items():
        table.add_row(Text(device), ", ".join(dtypes), heads, kernel, Text(refusals), end_section=True)
    return table


def _refusals(choice: KernelChoice) -> str:
    """Return why the other kernels are not chosen; kernels with the same reason share a line."""
    reasons = grouped((reason or "slower", name) for name, reason in choice.verdicts if name != choice.kernel)
    return "\n".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def _patches(facts: Sequence[Facts]) -> Table | None:
    states = list(dict.fromkeys(patch for rank_facts in facts for patch in rank_facts.patches))
    if not states:
        return None
    versions = dict.fromkeys(rank_facts.package("megatron-core").version or "none" for rank_facts in facts)
    patch_column, purpose = _folding(f"patch of megatron-core {', '.join(versions)}", "what for")
    table = Table(patch_column, Column("state", no_wrap=True), purpose)
    for patch in states:
        style = _STYLES["error"] if patch.state == "does not fit" else ""
        table.add_row(Text(patch.target), Text(patch.state, style), Text(patch.why))
    return table


def _network(facts: Sequence[Facts]) -> Table | None:
    hosts = {rank_facts.host: rank_facts for rank_facts in reversed(facts)}  # one process of each host
    table = Table(*_folding("host", "interface", "state", "speed", "addresses"))
    for host, rank_facts in reversed(hosts.items()):
        for interface in rank_facts.network.interfaces:
            if interface.up:
                mbit_s = interface.speed_mbit_s
                speed = "not known" if mbit_s is None else f"{mbit_s / 1000:g} Gb/s"
                cells = (host, interface.name, "up", speed, ", ".join(interface.addresses))
                table.add_row(*map(Text, cells))
        for port in rank_facts.network.infiniband:
            cells = (host, f"{port.device}:{port.port}", port.state.lower(), port.rate, port.link_layer)
            table.add_row(*map(Text, cells))
    return table if table.rows else None


def _environment(facts: Sequence[Facts]) -> Table | None:
    values = grouped(
        (variable, rank_facts)
        for rank_facts in facts
        for variable in rank_facts.environment.items()
        if variable[0] not in _OF_ONE_RANK
    )
    if not values:
        return None
    table = Table(*_folding("variable", "value", "on"))
    for (name, value), ranks in sorted(values.items()):
        where = "everywhere" if len(ranks) == len(facts) > 1 else spell_places(ranks)
        table.add_row(Text(name), Text(value), Text(where))
    return table


def _findings(problems: Sequence[Problem]) -> list[RenderableType]:
    if not problems:
        return [Text("healthy: nothing found")]
    placed = any(problem.where for problem in problems)
    table = Table(Column(no_wrap=True), *_folding(*(["on"] if placed else []), "what", "what to do"))
    for problem in problems:
        where = [Text(problem.where)] if placed else []
        severity = Text(problem.severity, _STYLES[problem.severity])
        table.add_row(severity, *where, Text(problem.what), Text(problem.remedy), end_section=True)
    counts = Counter(problem.severity for problem in worst_first(problems))
    summary = ", ".join(
        f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items()
    )
    return [Text(f"{'healthy' if healthy(problems) else 'not healthy'}: {summary}"), table]
