"""Combinations in which every two values of two factors meet at least once: the greedy algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

#: A choice of a value for each factor, or for some.
Choice = dict[str, str]


def all_pairs(factors: Mapping[str, Sequence[str]], allowed: Callable[[Choice], bool]) -> list[Choice]:
    """Few combinations that hold every pair of values that can stand together; the same ones each time.

    Args:
        factors: values by factor.
        allowed: whether a choice, perhaps of some factors only, can be completed; what it allows it must
            allow of every part, too.
    """
    wanted = [
        {first: a, second: b}
        for first, second in combinations(factors, 2)
        for a in factors[first]
        for b in factors[second]
        if allowed({first: a, second: b})
    ]
    missing = {frozenset(pair.items()) for pair in wanted}
    rows = []
    for pair in wanted:
        if frozenset(pair.items()) not in missing:
            continue
        row: Choice | None = dict(pair)
        for factor in factors:
            if row is not None and factor not in row:
                row = _extended(row, factor, factors[factor], missing, allowed)
        if row is not None:
            missing -= set(map(frozenset, combinations(row.items(), 2)))
            rows.append({factor: row[factor] for factor in factors})
    return rows


def _extended(
    row: Choice,
    factor: str,
    values: Sequence[str],
    missing: set[frozenset[tuple[str, str]]],
    allowed: Callable[[Choice], bool],
) -> Choice | None:
    """The row with the value that adds the most missing pairs; `None` where none is allowed."""
    choices = [{**row, factor: value} for value in values if allowed({**row, factor: value})]
    return max(
        choices,
        key=lambda choice: sum(
            frozenset((item, (factor, choice[factor]))) in missing for item in row.items()
        ),
        default=None,
    )
