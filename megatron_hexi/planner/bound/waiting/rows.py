"""What rows need of the linear program that they go into (together.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: A variable, by its number, and how often it is taken.
Term = tuple[int, float]
#: Something to begin with: a sum, and what is added to it.
Start = tuple[list[Term], float]


class Rows(Protocol):
    """The linear program, as far as rows need it.

    Args:
        tokens: of each group.
        parts: of each of its sites, the part of the heads.
        held: likewise, tokens.
    """

    tokens: list[int]
    parts: list[list[int]]
    held: list[list[int]]

    def time(self, count: float = 0.0) -> int:
        """A time, that counts so often."""

    def above(self, time: int, terms: Sequence[Term], at_least: float = 0.0) -> None:
        """The time is no less than this sum."""


class RoomRows(Rows, Protocol):
    """The same, where rows are of memory too."""

    def fits(self, room: float, terms: Sequence[Term]) -> None:
        """So many tokens have room: no less than this sum."""

    def bounds(self, variable: int) -> tuple[float, float]:
        """The least and the most that a variable may be."""


def scaled(often: float, terms: Sequence[Term]) -> list[Term]:
    """A sum, so often."""
    return [(variable, often * each) for variable, each in terms]
