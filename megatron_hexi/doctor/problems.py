"""A problem, and how it is mended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]

#: The worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Problem:
    """One line of the doctor's findings.

    Attributes:
        severity: ``error``: a job will not start, or not be right; ``warning``: it will be slow, or fail
            where the network is needed; ``note``: worth knowing.
        what: what is wrong, with the value that is.
        remedy: what to do about it.
        where: the hosts and ranks that have it; empty where there is only this process.
    """

    severity: Severity
    what: str
    remedy: str
    where: str = ""


def said(severity: Severity, message: str) -> Problem:
    """A problem from the line of a `HexiError`, which ends in its remedy: ``place: what; remedy``."""
    what, _, remedy = message.rpartition("; ")
    return Problem(severity, what or message, remedy if what else "see above")


def worst_first(problems: list[Problem]) -> list[Problem]:
    """Errors, then warnings, then notes; otherwise in the order given."""
    return sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity))


def healthy(problems: list[Problem]) -> bool:
    """Whether none of them is an error."""
    return all(problem.severity != "error" for problem in problems)
