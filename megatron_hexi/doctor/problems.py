"""Problems with their severity and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
