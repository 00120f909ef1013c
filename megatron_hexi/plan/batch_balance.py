"""Balance one batch of packed documents: tokens, heads and documents of each unit of a domain.

A plan's shares fit a sequence of one document. A sequence of many short documents has as many rows but less
attention, so shares that balance the rows leave the attention unbalanced. This module chooses shares by the
lengths of the documents, which every rank knows. The time of a unit is rows x seconds per row + pairs of
query and key x seconds per pair x the unit's fraction of the heads; all units are to take equally long,
within the memory of each.

Whole documents are assigned to groups, the longest first, each to the group that finishes first (LPT: Graham
1969, "Bounds on multiprocessing timing anomalies"); keys of a whole document need not travel. The remaining
imbalance is removed by cutting as few documents as possible over all groups, in a weighted zigzag that lets
all groups finish at the same time.

The positions of a group are cut from each document in a weighted zigzag over all groups, like a sequence of
one document. A group's share of the work therefore equals its share of the tokens for any lengths of
documents, and its number of tokens is the same in every sequence. A group holds few tokens of one document,
so rounding errors are carried over to the next documents; over all documents they add up to nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_hexi.plan.layout import apportion, consecutive, merge_segments
from megatron_hexi.plan.model import Domain, Group, Member, Range
from megatron_hexi.plan.terms import UnitRates


def batch_domain(domain: Domain, documents: tuple[int, ...] | None, rates: UnitRates | None) -> Domain:
    """Return a domain with the positions, tokens and heads of its members in one batch.

    Args:
        documents: lengths of the batch's documents; ``None``: the plan's own shares, of a whole sequence.
        rates: rates of the domain's units, in the order of `domain.members`, if each batch is balanced by
            them (`balanced_domain`); ``None``: groups keep their numbers of tokens (`packed_domain`).
    """
    if documents is None:
        return domain
    return packed_domain(domain, documents) if rates is None else balanced_domain(domain, documents, rates)


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
    """Cut each document in a weighted zigzag; return each group's ranges of positions, some empty.

    Args:
        tokens: number of tokens of each group; their sum equals the sum of the documents' lengths.
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


#: Tolerated imbalance: documents are cut only while a unit exceeds its share of the work by this fraction.
EVEN = 0.02
_HALVINGS = 50
_ROUNDS = 4


@dataclass(frozen=True)
class _Pace:
    """The speed of a unit or group: seconds per row, seconds per pair, and memory in tokens (`room`)."""

    row_s: float
    pair_s: float
    room: float

    @classmethod
    def together(cls, paces: Sequence[_Pace], attended: float) -> _Pace:
        """Return the pace of a group whose units have these paces and divide the work in proportion to speed.

        Args:
            attended: memory of a token of the group, relative to the memory of a token that the unit holds.
        """
        return cls(
            1 / sum(1 / pace.row_s for pace in paces),
            1 / sum(1 / pace.pair_s for pace in paces),
            sum(pace.room for pace in paces) / (1 + attended),
        )


@dataclass(frozen=True)
class _Placement:
    """Assignment of documents to groups: whole documents by number, and tokens of documents that are cut."""

    whole: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...]
    cut_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    pairs: tuple[float, ...]


@lru_cache(maxsize=64)  # all layers ask for the same
def balanced_domain(domain: Domain, documents: tuple[int, ...], rates: UnitRates) -> Domain:
    """Return the domain with segments, tokens and heads that balance one batch of documents.

    Args:
        documents: lengths of the documents; their sum is the domain's number of tokens.
        rates: rates of the domain's units, in the order of `domain.members`.

    Returns:
        The balanced domain. If the plan's own shares (`packed_domain`) are balanced enough, or no better
        shares fit the memory of the units, the domain with the plan's shares.
    """
    even = even_seconds(domain, documents, rates)
    paces = _paces(domain, rates)
    groups = [
        _Pace.together([paces[member.lead] for member in group.members], rates.attended)
        for group in domain.groups
    ]
    best, least = packed_domain(domain, documents), math.inf
    for placement in _placements(documents, groups):
        candidate = _build(domain, documents, placement, paces, rates.attended)
        if candidate is None:
            continue
        seconds = max(unit_seconds(candidate, documents, rates))
        if seconds < least:
            best, least = candidate, seconds
        if least <= (1 + EVEN) * even:
            break
    return best


def even_seconds(domain: Domain, documents: Sequence[int], rates: UnitRates) -> float:
    """Return the seconds that each unit would take for a batch if rows and pairs were balanced ideally."""
    pace = _Pace.together(list(_paces(domain, rates).values()), rates.attended)
    return pace.row_s * sum(documents) + pace.pair_s * sum(map(_pairs, documents))


def unit_seconds(domain: Domain, documents: Sequence[int], rates: UnitRates) -> list[float]:
    """Return the seconds that each unit needs for a batch, in the order of the domain's members."""
    heads = max(member.heads[1] for member in domain.members)
    ends = [stop for _, stop in consecutive(documents)]
    paces, seconds = _paces(domain, rates), {}
    for group in domain.groups:
        pairs = _visible(group.segments, documents, ends)
        for member in group.members:
            pace, part = paces[member.lead], (member.heads[1] - member.heads[0]) / heads
            seconds[member.lead] = member.tokens * pace.row_s + part * pairs * pace.pair_s
    return [seconds[member.lead] for member in domain.members]


def _visible(segments: Sequence[Range], documents: Sequence[int], ends: Sequence[int]) -> float:
    """Return the number of pairs of query and visible key for the queries in the given segments."""
    total, number = 0, 0
    for start, stop in segments:
        while start < stop:
            while ends[number] <= start:
                number += 1
            first, last = start - ends[number] + documents[number], min(stop, ends[number])
            rows = last - start
            total += rows * first + rows * (rows + 1) // 2
            start = last
    return float(total)


def _placements(documents: Sequence[int], groups: Sequence[_Pace]) -> Iterator[_Placement]:
    """Yield possible placements of the documents, those that cut the fewest tokens first."""
    order = sorted((n for n, count in enumerate(documents) if count), key=lambda n: (-documents[n], n))
    halvings = [len(order) >> shift for shift in range(1, len(order).bit_length())]
    single = [(order[place],) for place in (*halvings, 0)]
    several = [tuple(order[: 2**power]) for power in range(1, len(order).bit_length())]
    for cut in ((), *single, *several, tuple(order)):
        whole = [number for number in order if number not in cut]
        placement = _placed(documents, whole, cut, groups)
        if placement is not None:
            yield placement


def _placed(
    documents: Sequence[int], order: Sequence[int], cut: tuple[int, ...], groups: Sequence[_Pace]
) -> _Placement | None:
    """Place documents, in `order`, each in the group that finishes first; cut those in `cut` over all groups.

    Returns:
        The placement; ``None`` if a whole document fits no group's memory, or if the cut documents do not
        fit beside the whole ones.
    """
    whole: list[list[int]] = [[] for _ in groups]
    tokens, pairs, busy = ([0.0] * len(groups) for _ in range(3))
    for number in order:
        rows, area = documents[number], _pairs(documents[number])
        finishes = [
            (busy[g] + rows * pace.row_s + area * pace.pair_s, g)
            for g, pace in enumerate(groups)
            if tokens[g] + rows <= pace.room
        ]
        if not finishes:
            return None
        busy_then, g = min(finishes)
        whole[g].append(number)
        tokens[g], pairs[g], busy[g] = tokens[g] + rows, pairs[g] + area, busy_then
    rows, area = sum(documents[number] for number in cut), sum(_pairs(documents[number]) for number in cut)
    cut_tokens = [0] * len(groups)
    if cut:
        # So many seconds a token of what is cut, of which a group's part of tokens is its part of pairs.
        costs = [pace.row_s + area / rows * pace.pair_s for pace in groups]
        room = [max(0.0, pace.room - used) for pace, used in zip(groups, tokens, strict=True)]
        parts = _level(rows, busy, costs, room)
        if parts is None:
            return None
        cut_tokens = apportion(rows, parts)
    return _Placement(
        whole=tuple(map(tuple, whole)),
        cut=tuple(sorted(cut)),
        cut_tokens=tuple(cut_tokens),
        tokens=tuple(round(used) + more for used, more in zip(tokens, cut_tokens, strict=True)),
        pairs=tuple(
            used + (area * more / rows if rows else 0) for used, more in zip(pairs, cut_tokens, strict=True)
        ),
    )


def _level(
    total: float, busy: Sequence[float], costs: Sequence[float], room: Sequence[float]
) -> list[float] | None:
    """Divide an amount of work among workers so that all of them finish at the same time.

    Args:
        busy: seconds for which each worker is busy already.
        costs: seconds per unit of the amount, of each worker.

    Returns:
        The amount of each worker, (finish - busy) / cost limited to 0 … room; ``None`` if the rooms add up
        to less than `total`.
    """
    if sum(room) < total:
        return None
    if not total:
        return [0.0] * len(room)

    def filled(time: float) -> list[float]:
        return [
            min(most, max(0.0, (time - before) / cost))
            for before, cost, most in zip(busy, costs, room, strict=True)
        ]

    low = 0.0
    high = max(before + min(total, most) * cost for before, cost, most in zip(busy, costs, room, strict=True))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(filled(middle)) < total else (low, middle)
    parts = filled(high)
    return [part * total / sum(parts) for part in parts]


def _build(
    domain: Domain,
    documents: tuple[int, ...],
    placement: _Placement,
    paces: dict[int, _Pace],
    attended: float,
) -> Domain | None:
    """Return the domain with the documents as placed; ``None`` if the units of a group lack memory."""
    ranges = consecutive(documents)
    cut_segments = zigzag([ranges[number] for number in placement.cut], placement.cut_tokens)
    groups = []
    for number, group in enumerate(domain.groups):
        members = _shared(group, placement.tokens[number], placement.pairs[number], paces, attended)
        if members is None:
            return None
        whole = [ranges[document] for document in placement.whole[number]]
        groups.append(
            replace(group, segments=merge_segments([*whole, *cut_segments[number]]), members=members)
        )
    return replace(domain, groups=tuple(groups))


def _shared(
    group: Group, tokens: int, pairs: float, paces: dict[int, _Pace], attended: float
) -> tuple[Member, ...] | None:
    """Return the members of a group with tokens and heads chosen so that all members take about as long.

    Heads are whole numbers; tokens even out what remains. A unit whose memory is full of tokens gets more
    heads instead.
    """
    unit_paces = [paces[member.lead] for member in group.members]
    heads = max(member.heads[1] for member in group.members)
    weights = [1 / pace.pair_s for pace in unit_paces]
    best: tuple[float, list[int], list[int]] | None = None
    for _ in range(_ROUNDS):
        counts = apportion(heads, weights)
        busy = [pairs * count / heads * pace.pair_s for count, pace in zip(counts, unit_paces, strict=True)]
        room = [
            float(max(0, math.floor(pace.room - attended * tokens * count / heads)))
            for count, pace in zip(counts, unit_paces, strict=True)
        ]
        parts = _level(tokens, busy, [pace.row_s for pace in unit_paces], room)
        if parts is None:
            break
        rows = apportion(tokens, parts) if tokens else [0] * len(unit_paces)
        finishes = [
            before + row * pace.row_s for before, row, pace in zip(busy, rows, unit_paces, strict=True)
        ]
        if best is None or max(finishes) < best[0]:
            best = max(finishes), rows, counts
        if not pairs or max(finishes) <= (1 + EVEN) * min(finishes):
            break
        # Heads that would make all take as long with these rows.
        time = (
            pairs + sum(row * pace.row_s / pace.pair_s for row, pace in zip(rows, unit_paces, strict=True))
        ) / sum(1 / pace.pair_s for pace in unit_paces)
        weights = [
            max(0.0, time - row * pace.row_s) / pace.pair_s
            for row, pace in zip(rows, unit_paces, strict=True)
        ]
    if best is None:
        return None
    _, rows, counts = best
    # Heads stay in the order in which the plan has them.
    places = sorted(range(len(unit_paces)), key=lambda place: group.members[place].heads)
    starts = itertools.accumulate((counts[place] for place in places), initial=0)
    first = dict(zip(places, starts, strict=False))
    return tuple(
        replace(member, tokens=rows[place], heads=(first[place], first[place] + counts[place]))
        for place, member in enumerate(group.members)
    )


def _paces(domain: Domain, rates: UnitRates) -> dict[int, _Pace]:
    """Return the pace of each unit of a domain, by its first rank."""
    paces = map(_Pace, rates.row_s, rates.pair_s, rates.room)
    return dict(zip((member.lead for member in domain.members), paces, strict=True))


def _pairs(count: int) -> int:
    """Return the number of pairs of query and visible key in a causal document of `count` tokens."""
    return count * (count + 1) // 2
