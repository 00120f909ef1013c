"""What each step of the exchange moves and computes, for all groups of all replicas at once.

The same rules as plan/schedule.py, in arrays: in step s a group uses the keys of the group s places before
it in its replica, and each user gets each KV head from one owner. Steps come in chunks, small enough that
a chunk's arrays stay in the cache and large enough that Python's own time does not count.

Shape letters: C steps of a chunk, N groups, J segments, M messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Bools, Ints
from megatron_hexi.cost.plan_arrays import PlanArrays

#: Entries of a chunk's arrays, about.
CHUNK = 2**17


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive steps.

    Args:
        queries: of each rectangle, [C, N, J]; 0 where there is none.
        keys: prefix of the source's tokens that it sees, [C, N, J].
        step: the step of each message within the chunk, ascending, [M].
        owner: unit that sends keys and values, [M].
        user: unit that uses them, [M].
        kv: KV heads that travel, [M].
        sent: tokens of each that travel, [M].
    """

    queries: Ints
    keys: Ints
    step: Ints
    owner: Ints
    user: Ints
    kv: Ints
    sent: Ints

    @property
    def received(self) -> Ints:
        """Tokens that each group is sent of each KV head, [C, N]."""
        return self.keys.max(axis=2)


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
    return Chunk(
        queries=queries,
        keys=keys,
        step=step[pair],
        owner=plan.slots[plan.first_slot[owner_group[pair]] + serving.owner[entry]],
        user=plan.slots[plan.first_slot[user_group[pair]] + serving.user[entry]],
        kv=serving.kv[entry],
        sent=received[step[pair], user_group[pair]],
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
