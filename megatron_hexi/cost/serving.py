"""Owners and users of keys and values, for all pairs of head classes: `plan.schedule.kv_owners` in arrays.

Groups whose members have the same head ranges are one class. A plan for a large mixed cluster may have
hundreds of classes, so hundreds of thousands of pairs of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_hexi.cost.arrays import Ints
from megatron_hexi.plan.heads import head_parts, kv_pieces
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import kv_owners


@dataclass(frozen=True, eq=False)
class Serving:
    """Messages between two groups, by their classes.

    Args:
        first: where the entries of each pair (user's class, owner's class) begin, [classes, classes].
        count: how many it has, [classes, classes].
        user: position in the user's group, of each entry.
        owner: position in the owner's group.
        kv: KV heads that travel.
    """

    first: Ints
    count: Ints
    user: Ints
    owner: Ints
    kv: Ints


@lru_cache(maxsize=64)  # a search moves tokens more often than heads
def serving(classes: tuple[tuple[Range, ...], ...], queries_per_kv: int) -> Serving:
    """For each pair of classes what the members of the one are served by the other's.

    A KV head comes from the owner that shares the most of the user's query heads of it, the first of several;
    neighbouring KV heads from one owner are one entry.

    Args:
        classes: for each class the query heads of its members.
        queries_per_kv: query heads that share a KV head.
    """
    users = [
        [(place, piece) for place, heads in enumerate(members) for piece in kv_pieces(heads, queries_per_kv)]
        for members in classes
    ]
    numbers: dict[Range, int] = {}
    for member_pieces in users:
        for _, piece in member_pieces:
            numbers.setdefault(piece, len(numbers))
    owners = _owners(list(numbers), classes)
    counts, positions, found, sizes = [], [], [], []
    for member_pieces in users:
        member = np.array([position for position, _ in member_pieces])
        owner = owners[[numbers[piece] for _, piece in member_pieces]].T
        begins = np.ones(owner.shape, dtype=bool)
        begins[:, 1:] = (owner[:, 1:] != owner[:, :-1]) | (member[1:] != member[:-1])
        starts = np.flatnonzero(begins)
        counts.append(begins.sum(axis=1))
        positions.append(member[starts % len(member)])
        found.append(owner.ravel()[starts])
        sizes.append(np.diff(starts, append=owner.size))
    count = np.stack(counts)
    first = (np.cumsum(count) - count.ravel()).reshape(count.shape)
    return Serving(first, count, np.concatenate(positions), np.concatenate(found), np.concatenate(sizes))


@lru_cache(maxsize=4096)
def serving_in_parts(
    users: tuple[Range, ...], owners: tuple[Range, ...], queries_per_kv: int, parts: int
) -> Ints:
    """The same of one pair of classes, where each user's heads travel in parts.

    Returns:
        Positions of user and owner, KV heads that travel, and the part, of each message, [4, M].
    """
    found = [
        (user, owner, kv[1] - kv[0], part)
        for user, heads in enumerate(users)
        for part, some in enumerate(head_parts(heads, queries_per_kv, parts))
        for owner, kv in kv_owners(some, owners, queries_per_kv)
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 4).T


def _owners(pieces: Sequence[Range], classes: Sequence[Sequence[Range]]) -> Ints:
    """Position of the member that serves a piece, [pieces, classes]."""
    low, high = (np.array([piece[end] for piece in pieces])[:, None] for end in range(2))
    best = np.zeros((len(pieces), len(classes)), dtype=np.int64)
    for number, members in enumerate(classes):
        starts, stops = (np.array([heads[end] for heads in members]) for end in range(2))
        best[:, number] = np.argmax(np.minimum(high, stops) - np.maximum(low, starts), axis=1)
    return best
