"""The layout of a sequence of several documents.

Each document is cut as a sequence is: in a weighted zigzag over all groups. So a group's part of the work is
its part of the tokens for any lengths of documents, and its number of tokens is the same in every sequence. A
group has few tokens of a document, so what rounding leaves is carried over to the next documents; over all of
them nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_hexi.plan.layout import consecutive, merge_segments
from megatron_hexi.plan.model import Domain, Range


@lru_cache(maxsize=64)  # all layers ask for the same
def packed_domain(domain: Domain, documents: tuple[int, ...]) -> Domain:
    """Return a domain with segments cut document by document, with as many tokens for each group.

    Args:
        domain: the plan's domain.
        documents: lengths of the documents; their sum is the domain's number of tokens.
    """
    tokens = [group.tokens for group in domain.groups]
    groups = tuple(
        replace(group, segments=merge_segments(pieces))
        for group, pieces in zip(domain.groups, zigzag(consecutive(documents), tokens), strict=True)
    )
    return replace(domain, groups=groups)


def zigzag(documents: Sequence[Range], tokens: Sequence[int]) -> list[list[Range]]:
    """Return the positions of each group, with each document cut in a weighted zigzag over all groups.

    Args:
        documents: positions of each document.
        tokens: number of tokens of each group; their sum is that of the documents.

    Returns:
        The positions of each group, some of them empty ranges.
    """
    fronts = [count // 2 for count in tokens]
    backs = [count - count // 2 for count in tokens]
    positions: list[list[Range]] = [[] for _ in tokens]
    lengths = [stop - start for start, stop in documents]
    for (start, _), counts in zip(
        documents, proportional_table(lengths, [*fronts, *reversed(backs)]), strict=True
    ):
        for place, piece in enumerate(consecutive(counts, start)):
            positions[place if place < len(tokens) else 2 * len(tokens) - 1 - place].append(piece)
    return positions


def proportional_table(rows: Sequence[int], columns: Sequence[int]) -> list[list[int]]:
    """Return a table of counts with given sums of rows and columns, each row in the columns' proportion.

    The columns are halved again and again, and each half is given what it lacks of its exact share of all
    rows so far, rounded down: sums are exact, and nothing is off its share by more than one a halving.

    Args:
        rows: sums of the rows.
        columns: sums of the columns; their total is that of the rows.
    """
    if len(columns) == 1:
        return [[count] for count in rows]
    middle = len(columns) // 2
    total, first = sum(columns), sum(columns[:middle])
    first_half: list[int] = []
    so_far = assigned = 0
    for count in rows:
        so_far += count
        here = so_far * first // total - assigned if total else 0
        assigned += here
        first_half.append(here)
    second_half = [count - here for count, here in zip(rows, first_half, strict=True)]
    return [
        left + right
        for left, right in zip(
            proportional_table(first_half, columns[:middle]),
            proportional_table(second_half, columns[middle:]),
            strict=True,
        )
    ]
