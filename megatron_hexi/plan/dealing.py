"""Shares of one batch: tokens, heads and documents dealt to a domain's units by the batch's real work.

A plan's shares fit a sequence of one document. With many short ones there is less attention beside as many
rows, and shares that balance the one leave some unit behind in the other. Here the shares follow the
documents' lengths, which every rank knows: work of a unit = rows x seconds a row + pairs of query and key x
seconds a pair x its part of the heads, and each unit's is to be alike, within its memory.

Documents go to groups whole, the largest first, each to the group that has done soonest (LPT: Graham 1969,
"Bounds on multiprocessing timing anomalies"): their keys need not travel. What that leaves uneven is evened
out by cutting as little as will do: the document or the few of them that are cut over all groups, in a
weighted zigzag, fill every group up to one time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_hexi.plan.layout import apportion, consecutive, merge_segments
from megatron_hexi.plan.model import Domain, Group, Member, Range
from megatron_hexi.plan.packing import packed_domain, zigzag
from megatron_hexi.plan.terms import UnitRates

#: As few documents are cut as leave no unit busy for longer than this part above its share of the work.
EVEN = 0.02
_HALVINGS = 50
_ROUNDS = 4


@dataclass(frozen=True)
class _Pace:
    """Of a unit, or of a group whose units share its work: seconds of a row and of a pair, room in tokens."""

    row_s: float
    pair_s: float
    room: float

    @classmethod
    def together(cls, paces: Sequence[_Pace], attended: float) -> _Pace:
        """Of units that share rows and pairs as fast as each is; rows that all have room for."""
        return cls(
            1 / sum(1 / pace.row_s for pace in paces),
            1 / sum(1 / pace.pair_s for pace in paces),
            sum(pace.room for pace in paces) / (1 + attended),
        )


@dataclass(frozen=True)
class _Placement:
    """Which documents each group holds whole, by their place, and its tokens of those that are cut."""

    whole: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...]
    cut_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    pairs: tuple[float, ...]


@lru_cache(maxsize=64)  # all layers ask for the same
def dealt_domain(domain: Domain, documents: tuple[int, ...], rates: UnitRates) -> Domain:
    """The domain with the shares of one batch.

    Args:
        domain: of the plan.
        documents: lengths of the documents; together as many tokens as the domain's.
        rates: of the plan's units.

    Returns:
        The domain with other segments, tokens and heads; with the plan's, as `packed_domain` gives them,
        where these are even enough or nothing better fits the units' memory.
    """
    even = even_seconds(domain, documents, rates)
    paces = {member.lead: _pace(member, rates) for member in domain.members}
    groups = [
        _Pace.together([paces[member.lead] for member in group.members], rates.attended)
        for group in domain.groups
    ]
    best, least = packed_domain(domain, documents), math.inf
    for placement in _placements(documents, groups):
        found = _build(domain, documents, placement, paces, rates.attended)
        if found is None:
            continue
        seconds = max(unit_seconds(found, documents, rates))
        if seconds < least:
            best, least = found, seconds
        if least <= (1 + EVEN) * even:
            break
    return best


def even_seconds(domain: Domain, documents: Sequence[int], rates: UnitRates) -> float:
    """What each unit's work of a batch takes where rows and pairs are shared as fast as each unit is."""
    pace = _Pace.together([_pace(member, rates) for member in domain.members], rates.attended)
    return pace.row_s * sum(documents) + pace.pair_s * sum(map(_pairs, documents))


def unit_seconds(domain: Domain, documents: Sequence[int], rates: UnitRates) -> list[float]:
    """What the work of a batch takes each unit, in the order of the domain's members.

    Args:
        domain: with the shares of this batch.
        documents: lengths of the documents.
        rates: of the plan's units.
    """
    heads = max(member.heads[1] for member in domain.members)
    ends = [stop for _, stop in consecutive(documents)]
    seconds = {}
    for group in domain.groups:
        pairs = _visible(group.segments, documents, ends)
        for member in group.members:
            pace, part = _pace(member, rates), (member.heads[1] - member.heads[0]) / heads
            seconds[member.lead] = member.tokens * pace.row_s + part * pairs * pace.pair_s
    return [seconds[member.lead] for member in domain.members]


def _visible(segments: Sequence[Range], documents: Sequence[int], ends: Sequence[int]) -> float:
    """Pairs that the queries of these segments see."""
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
    """Ways to place documents, those first that cut the fewest tokens."""
    order = sorted((n for n, count in enumerate(documents) if count), key=lambda n: (-documents[n], n))
    halvings = [len(order) >> shift for shift in range(1, len(order).bit_length())]
    single = [(order[place],) for place in (*halvings, 0)]
    several = [tuple(order[: 2**power]) for power in range(1, len(order).bit_length())]
    for cut in ((), *single, *several, tuple(order)):
        whole = [number for number in order if number not in cut]
        found = _placed(documents, whole, cut, groups)
        if found is not None:
            yield found


def _placed(
    documents: Sequence[int], order: Sequence[int], cut: tuple[int, ...], groups: Sequence[_Pace]
) -> _Placement | None:
    """Documents in this order, whole, to the group that has done soonest; the others cut over all groups.

    Returns:
        ``None`` where a whole one fits no group's memory, or what is cut does not fit beside them.
    """
    whole: list[list[int]] = [[] for _ in groups]
    tokens, pairs, busy = ([0.0] * len(groups) for _ in range(3))
    for number in order:
        rows, area = documents[number], _pairs(documents[number])
        done = [
            (busy[g] + rows * pace.row_s + area * pace.pair_s, g)
            for g, pace in enumerate(groups)
            if tokens[g] + rows <= pace.room
        ]
        if not done:
            return None
        busy_then, g = min(done)
        whole[g].append(number)
        tokens[g], pairs[g], busy[g] = tokens[g] + rows, pairs[g] + area, busy_then
    rows, area = sum(documents[number] for number in cut), sum(_pairs(documents[number]) for number in cut)
    cut_tokens = [0] * len(groups)
    if cut:
        # So many seconds a token of what is cut, of which a group's part of tokens is its part of pairs.
        costs = [pace.row_s + area / rows * pace.pair_s for pace in groups]
        room = [max(0.0, pace.room - held) for pace, held in zip(groups, tokens, strict=True)]
        parts = _level(rows, busy, costs, room)
        if parts is None:
            return None
        cut_tokens = apportion(rows, parts)
    return _Placement(
        whole=tuple(map(tuple, whole)),
        cut=tuple(sorted(cut)),
        cut_tokens=tuple(cut_tokens),
        tokens=tuple(round(held) + more for held, more in zip(tokens, cut_tokens, strict=True)),
        pairs=tuple(
            held + (area * more / rows if rows else 0) for held, more in zip(pairs, cut_tokens, strict=True)
        ),
    )


def _level(
    total: float, busy: Sequence[float], costs: Sequence[float], room: Sequence[float]
) -> list[float] | None:
    """Parts of a total that fill all up to one time: each (time - busy) / cost, from 0 to its room.

    Returns:
        ``None`` where there is not room enough.
    """
    if sum(room) < total:
        return None
    if not total:
        return [0.0] * len(room)

    def filled(time: float) -> list[float]:
        return [
            min(most, max(0.0, (time - done) / cost))
            for done, cost, most in zip(busy, costs, room, strict=True)
        ]

    low = 0.0
    high = max(done + min(total, most) * cost for done, cost, most in zip(busy, costs, room, strict=True))
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
    """The domain by a placement; ``None`` where a group's units have no room for it."""
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
    """A group's members with their parts of its tokens and heads, such that all take about as long.

    Heads are whole, so tokens make up for them. A unit whose memory holds no more tokens gets heads instead.
    """
    own = [paces[member.lead] for member in group.members]
    heads = max(member.heads[1] for member in group.members)
    weights = [1 / pace.pair_s for pace in own]
    best: tuple[float, list[int], list[int]] | None = None
    for _ in range(_ROUNDS):
        counts = apportion(heads, weights)
        busy = [pairs * count / heads * pace.pair_s for count, pace in zip(counts, own, strict=True)]
        room = [
            float(max(0, math.floor(pace.room - attended * tokens * count / heads)))
            for count, pace in zip(counts, own, strict=True)
        ]
        parts = _level(tokens, busy, [pace.row_s for pace in own], room)
        if parts is None:
            break
        rows = apportion(tokens, parts) if tokens else [0] * len(own)
        done = [before + row * pace.row_s for before, row, pace in zip(busy, rows, own, strict=True)]
        if best is None or max(done) < best[0]:
            best = max(done), rows, counts
        if not pairs or max(done) <= (1 + EVEN) * min(done):
            break
        # Heads that would make all take as long with these rows.
        time = (
            pairs + sum(row * pace.row_s / pace.pair_s for row, pace in zip(rows, own, strict=True))
        ) / sum(1 / pace.pair_s for pace in own)
        weights = [
            max(0.0, time - row * pace.row_s) / pace.pair_s for row, pace in zip(rows, own, strict=True)
        ]
    if best is None:
        return None
    _, rows, counts = best
    # Heads stay in the order in which the plan has them.
    places = sorted(range(len(own)), key=lambda place: group.members[place].heads)
    starts = itertools.accumulate((counts[place] for place in places), initial=0)
    first = dict(zip(places, starts, strict=False))
    return tuple(
        replace(member, tokens=rows[place], heads=(first[place], first[place] + counts[place]))
        for place, member in enumerate(group.members)
    )


def _pace(member: Member, rates: UnitRates) -> _Pace:
    number = member.number
    return _Pace(rates.row_s[number], rates.pair_s[number], rates.room[number])


def _pairs(count: int) -> int:
    """Pairs that a causal document's queries see."""
    return count * (count + 1) // 2
