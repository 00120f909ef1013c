"""The layout of a sequence that consists of documents.

Each document is cut like a sequence of its own: a weighted zigzag over all groups. So a group's part of the
work is its part of the tokens whatever the documents' lengths are, and neither its tokens nor what its ranks
hold change from one sequence to the next. A document has few tokens for a group, so halves of tokens are
carried over to the next documents; over all of them nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_hexi.plan.layout import consecutive, merge_segments
from megatron_hexi.plan.model import Domain, Range


@lru_cache(maxsize=64)  # all layers ask for the same
def packed_domain(domain: Domain, documents: tuple[int, ...]) -> Domain:
    """The domain with other segments: as many tokens for each group, cut document by document.

    Args:
        domain: of the plan.
        documents: lengths of the documents; together as many tokens as the domain's.
    """
    tokens = [group.tokens for group in domain.groups]
    groups = tuple(
        replace(group, segments=merge_segments(pieces))
        for group, pieces in zip(domain.groups, zigzag(consecutive(documents), tokens), strict=True)
    )
    return replace(domain, groups=groups)


def zigzag(documents: Sequence[Range], tokens: Sequence[int]) -> list[list[Range]]:
    """Documents cut over groups, each in a weighted zigzag.

    Args:
        documents: positions of each.
        tokens: of each group; together as many as the documents have.

    Returns:
        The positions of each group, some of them empty ranges.
    """
    fronts = [count // 2 for count in tokens]
    backs = [count - count // 2 for count in tokens]
    held: list[list[Range]] = [[] for _ in tokens]
    lengths = [stop - start for start, stop in documents]
    for (start, _), counts in zip(documents, deal(lengths, [*fronts, *reversed(backs)]), strict=True):
        for place, piece in enumerate(consecutive(counts, start)):
            held[place if place < len(tokens) else 2 * len(tokens) - 1 - place].append(piece)
    return held


def deal(rows: Sequence[int], columns: Sequence[int]) -> list[list[int]]:
    """A table of counts with the given sums of rows and of columns, each row in the columns' proportion.

    The columns are halved again and again, and each half is given what it lacks of its exact share of all
    rows so far, rounded down: sums are exact, and nothing is off its share by more than one a halving.

    Args:
        rows: sums of the rows.
        columns: sums of the columns; together as much as the rows.
    """
    if len(columns) == 1:
        return [[count] for count in rows]
    middle = len(columns) // 2
    total, first = sum(columns), sum(columns[:middle])
    firsts: list[int] = []
    done = given = 0
    for count in rows:
        done += count
        here = done * first // total - given if total else 0
        given += here
        firsts.append(here)
    rest = [count - here for count, here in zip(rows, firsts, strict=True)]
    return [
        left + right
        for left, right in zip(deal(firsts, columns[:middle]), deal(rest, columns[middle:]), strict=True)
    ]
