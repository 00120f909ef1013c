"""Problems with their severity, remedy, and the hosts and ranks that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from megatron_hexi.doctor.facts import Facts
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
        what: the problem, with the wrong value.
        remedy: what to do.
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
