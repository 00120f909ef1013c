"""Schedules of pairs: every two nodes meet once, with as many pairs at a time as possible."""

from __future__ import annotations

from collections.abc import Mapping


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which every two players meet once.

    The circle method: the first stays, the others move on by one seat each round. With an odd number
    one player sits out each round.

    >>> tournament(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    if players < 2:
        return []
    seats = [*range(players), *([-1] if players % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def flows(senders: range, receivers: range) -> list[tuple[int, int]]:
    """Pair senders with receivers so that all ranks of two nodes take part; the smaller node's repeat.

    >>> flows(range(0, 4), range(4, 6))
    [(0, 4), (1, 5), (2, 4), (3, 5)]
    """
    count = max(len(senders), len(receivers))
    return [(senders[i % len(senders)], receivers[i % len(receivers)]) for i in range(count)]


def local_rounds(nodes: Mapping[int, range]) -> list[list[tuple[int, tuple[int, int]]]]:
    """Return rounds in which every two ranks of a node meet once, in all nodes at the same time.

    Returns:
        Rounds of (node, two of its ranks).

    >>> local_rounds({0: range(0, 2), 2: range(4, 7)})
    [[(0, (0, 1)), (2, (5, 6))], [(2, (4, 6))], [(2, (4, 5))]]
    """
    rounds: list[list[tuple[int, tuple[int, int]]]] = []
    for number, ranks in nodes.items():
        for i, pairs in enumerate(tournament(len(ranks))):
            if i == len(rounds):
                rounds.append([])
            rounds[i] += [(number, (ranks[a], ranks[b])) for a, b in pairs]
    return rounds
