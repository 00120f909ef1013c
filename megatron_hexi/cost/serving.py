"""Messages of keys and values between groups, by head class: `plan.schedule.kv_owners` in arrays.

Groups whose members have the same head ranges are one head class. A plan for a large mixed cluster may have
hundreds of classes, hence hundreds of thousands of pairs of classes.
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
    """Messages of keys and values from a group that owns them to a group that uses them, by head class.

    The messages of all pairs of classes stand in one list, of E entries.

    Args:
        first: index of the first entry of each pair (user's class, owner's class), [classes, classes].
        count: number of entries of each pair, [classes, classes].
        user: position of the receiving member in the user's group, [E].
        owner: position of the sending member in the owner's group, [E].
        kv: number of KV heads in the message, [E].
    """

    first: Ints
    count: Ints
    user: Ints
    owner: Ints
    kv: Ints


@lru_cache(maxsize=64)  # a search moves tokens more often than heads
def serving(classes: tuple[tuple[Range, ...], ...], queries_per_kv: int) -> Serving:
    """Return the messages between groups of any two head classes.

    A user receives a KV head from the member of the other group that shares most of the user's query heads of
    it, the first of several; neighbouring KV heads from the same member are one message.

    Args:
        classes: query heads of each member of a group, for each head class.
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
    """Return the messages from one group to another in a step whose keys travel in parts.

    Args:
        users: query heads of each member of the group that receives keys.
        owners: query heads of each member of the group that sends them.
        parts: largest number of parts of a user's heads.

    Returns:
        Positions of user and owner, number of KV heads, and number of the part, of each message, [4, M].
    """
    found = [
        (user, owner, kv[1] - kv[0], part)
        for user, heads in enumerate(users)
        for part, some in enumerate(head_parts(heads, queries_per_kv, parts))
        for owner, kv in kv_owners(some, owners, queries_per_kv)
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 4).T


def _owners(pieces: Sequence[Range], classes: Sequence[Sequence[Range]]) -> Ints:
    """Return the position of the member that sends each piece of heads, in a group of each class.

    It is the member that shares most heads with the piece, the first of several, [pieces, classes].
    """
    low, high = (np.array([piece[end] for piece in pieces])[:, None] for end in range(2))
    best = np.zeros((len(pieces), len(classes)), dtype=np.int64)
    for number, members in enumerate(classes):
        starts, stops = (np.array([heads[end] for heads in members]) for end in range(2))
        best[:, number] = np.argmax(np.minimum(high, stops) - np.maximum(low, starts), axis=1)
    return best
