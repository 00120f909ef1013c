"""What each step of the exchange moves and computes, for all groups of all replicas at once.

The same rules as plan/schedule.py, in arrays: in step s a group uses the keys of the group s places before
it in its replica, and each user gets each KV head from one owner. The first step may travel in several
parts. Steps come in chunks, small enough that a chunk's arrays stay in the cache and large enough that
Python's own time does not count.

Shape letters: C parts of all steps of a chunk, N groups, J segments, M messages, U units.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hexi.cost.arrays import Bools, Ints
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.serving import serving_in_parts

#: Entries of a chunk's arrays, about.
CHUNK = 2**17


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive steps.

    Args:
        parts: of each step, how many parts it has; their sum is C.
        queries: of each rectangle, [C, N, J]; 0 where there is none.
        keys: prefix of the source's tokens that it sees, [C, N, J].
        heads: query heads that each unit computes, [C, U].
        kv_heads: KV heads that these read, [C, U].
        part: the part of each message within the chunk, ascending, [M].
        owner: unit that sends keys and values, [M].
        user: unit that uses them, [M].
        kv: KV heads that travel, [M].
        sent: tokens of each that travel, [M].
    """

    parts: tuple[int, ...]
    queries: Ints
    keys: Ints
    heads: Ints
    kv_heads: Ints
    part: Ints
    owner: Ints
    user: Ints
    kv: Ints
    sent: Ints

    @cached_property
    def received(self) -> Ints:
        """Tokens that each group is sent of each KV head, [C, N]."""
        return self.keys.max(axis=2)

    def messages(self, part: int) -> slice:
        """Where those of a part are."""
        return slice(self._bounds[part], self._bounds[part + 1])

    @cached_property
    def _bounds(self) -> Ints:
        return np.searchsorted(self.part, np.arange(len(self.keys) + 1))

    @property
    def steps(self) -> Iterator[range]:
        """The parts of each step."""
        ends = list(itertools.accumulate(self.parts, initial=0))
        return (range(*pair) for pair in itertools.pairwise(ends))


def exchange_chunks(plan: PlanArrays) -> Iterator[Chunk]:
    """All steps of the exchange, in order."""
    groups, most = plan.starts.shape
    steps = int(plan.groups_beside.max()) - 1
    length = max(1, CHUNK // max(len(plan.tokens), groups * most))
    for first in range(1, steps + 1, length):
        yield _chunk(plan, np.arange(first, min(first + length, steps + 1)))


def _chunk(plan: PlanArrays, distances: Ints) -> Chunk:
    # Groups of a replica with fewer groups have no further steps.
    active = distances[:, None] < plan.groups_beside
    numbers = np.arange(len(plan.replica))
    source = plan.first_group + (numbers - plan.first_group - distances[:, None]) % plan.groups_beside
    queries, keys = _rectangles(plan, source, active)
    received = keys.max(axis=2)
    step, user_group = np.nonzero(received)
    owner_group = source[step, user_group]
    serving = plan.serving
    classes = plan.head_class[user_group], plan.head_class[owner_group]
    repeats = serving.count[classes]
    # For each pair of groups the entries of its pair of classes: first, first + 1, …
    pair = np.repeat(np.arange(len(step)), repeats)
    ends = np.cumsum(repeats)
    entry = serving.first[classes][pair] + np.arange(len(pair)) - (ends - repeats)[pair]
    whole = Chunk(
        parts=(1,) * len(distances),
        queries=queries,
        keys=keys,
        heads=np.broadcast_to(plan.heads, (len(distances), len(plan.heads))),
        kv_heads=np.broadcast_to(plan.kv, (len(distances), len(plan.kv))),
        part=step[pair],
        owner=plan.slots[plan.first_slot[owner_group[pair]] + serving.owner[entry]],
        user=plan.slots[plan.first_slot[user_group[pair]] + serving.user[entry]],
        kv=serving.kv[entry],
        sent=received[step[pair], user_group[pair]],
    )
    return whole if distances[0] > 1 or len(plan.part_heads) == 1 else _first_in_parts(plan, whole, source[0])


def _first_in_parts(plan: PlanArrays, chunk: Chunk, source: Ints) -> Chunk:
    """A chunk that begins with the first step, with that step cut in parts."""
    parts = len(plan.part_heads)
    rows = [0] * parts + list(range(1, len(chunk.keys)))
    using = np.flatnonzero(chunk.received[0])
    found = [
        serving_in_parts(
            plan.head_ranges[plan.head_class[group]],
            plan.head_ranges[plan.head_class[source[group]]],
            plan.queries_per_kv,
            parts,
        )
        for group in using
    ]
    user, owner, kv, part = np.concatenate([np.zeros((4, 0), dtype=np.int64), *found], axis=1)
    user_group = np.repeat(using, [one.shape[1] for one in found])
    later = chunk.part > 0
    number = np.concatenate([part, chunk.part[later] + parts - 1])
    order = np.argsort(number, kind="stable")

    def with_first(first: Ints, others: Ints) -> Ints:
        """Of the first step's messages and of the others, by part."""
        values: Ints = np.concatenate([first, others[later]])[order]
        return values

    return Chunk(
        parts=(parts, *chunk.parts[1:]),
        queries=chunk.queries[rows],
        keys=chunk.keys[rows],
        heads=np.concatenate([plan.part_heads, chunk.heads[1:]]),
        kv_heads=np.concatenate([plan.part_kv, chunk.kv_heads[1:]]),
        part=number[order],
        owner=with_first(plan.slots[plan.first_slot[source[user_group]] + owner], chunk.owner),
        user=with_first(plan.slots[plan.first_slot[user_group] + user], chunk.user),
        kv=with_first(kv, chunk.kv),
        sent=with_first(chunk.received[0, user_group], chunk.sent),
    )


def _rectangles(plan: PlanArrays, source: Ints, active: Bools) -> tuple[Ints, Ints]:
    """`plan.exchange_blocks` for all pairs: neighbours that see the same prefix are one rectangle."""
    shape = *source.shape, plan.starts.shape[1]
    keys = np.zeros(shape, dtype=np.int64)
    for place in range(shape[2]):
        start, stop = plan.starts[source, place], plan.stops[source, place]
        if plan.causal:
            stop = np.minimum(stop[..., None], plan.starts)
            keys += np.maximum(stop - start[..., None], 0)
        else:
            keys += (stop - start)[..., None]
    queries = np.broadcast_to(plan.stops - plan.starts, shape).copy()
    keys[(queries == 0) | ~active[..., None]] = 0
    for place in range(shape[2] - 1):
        same = (keys[..., place] == keys[..., place + 1]) & (keys[..., place] > 0)
        queries[..., place + 1] += np.where(same, queries[..., place], 0)
        keys[..., place][same] = 0
    queries[keys == 0] = 0
    return queries, keys
