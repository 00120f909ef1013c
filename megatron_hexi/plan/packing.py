"""The positions of each group in a packed sequence, a sequence of several documents.

Each document is cut in a weighted zigzag over all groups, like a sequence of one document. A group's share of
the work therefore equals the group's share of the tokens for any lengths of documents, and the group's number
of tokens is the same in every sequence. A group holds few tokens of one document, so rounding errors are
carried over to the next documents; over all documents they add up to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_hexi.plan.layout import consecutive, merge_segments
from megatron_hexi.plan.model import Domain, Range


@lru_cache(maxsize=64)  # all layers ask for the same
def packed_domain(domain: Domain, documents: tuple[int, ...]) -> Domain:
    """Return a domain whose segments are cut document by document, with unchanged tokens for each group.

    Args:
        documents: lengths of the documents; their sum is the domain's number of tokens.
    """
    tokens = [group.tokens for group in domain.groups]
    groups = tuple(
        replace(group, segments=merge_segments(pieces))
        for group, pieces in zip(domain.groups, zigzag(consecutive(documents), tokens), strict=True)
    )
    return replace(domain, groups=groups)


def zigzag(documents: Sequence[Range], tokens: Sequence[int]) -> list[list[Range]]:
    """Cut each document in a weighted zigzag over all groups; return the positions of each group.

    Args:
        tokens: number of tokens of each group; their sum equals the sum of the documents' lengths.

    Returns:
        The ranges of positions of each group; some ranges may be empty.
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
    """Return a table of integers with given row and column sums, each row in proportion to the column sums.

    The columns are halved recursively. Each half of the columns gets the difference between its exact share
    of all rows so far, rounded down, and the amount that it already has: sums are exact, and no entry differs
    from its exact share by more than one per halving.

    Args:
        columns: sum of each column; their total equals the total of `rows`.
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
