"""Messages and blocks of each step of the exchange, for all groups of all replicas at once.

The split tables (`plan.schedule`) of a plan without documents, in arrays, because a search computes them
thousands of times. In step s a group uses the keys of the group s places before it in its replica, and each
user gets each KV head from one owner; with a window only those that its queries see (`cost/windows.py`). The
keys of the first step may travel in several parts. Steps are computed in chunks, small enough that a chunk's
arrays stay in the cache and large enough that Python's overhead does not matter.

Shape letters: C parts of all steps of a chunk, N groups, J segments, M messages, U units.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.documents import ONE_DOCUMENT, PackedClass
from megatron_hexi.cost.plan_arrays import Grouping, PlanArrays
from megatron_hexi.cost.serving import serving_in_parts
from megatron_hexi.cost.windows import far_window

#: Approximate number of entries of a chunk's arrays.
CHUNK = 2**17
#: Largest steps x groups of a chunk whose messages are kept for the next plan with the same grouping.
KEPT = 2**12


@dataclass(frozen=True, eq=False)
class Chunk:
    """Messages and blocks of consecutive steps of the exchange.

    Args:
        parts: number of parts of each step; their sum is C.
        queries: queries of each rectangle, [C, N, J]; 0 where there is none.
        keys: keys that each rectangle's queries see, a prefix of the source group's tokens, [C, N, J]; with a
            window the mean number of keys that a query sees.
        received: tokens of each KV head that each group receives, [C, N].
        heads: query heads that each unit computes, [C, U].
        kv_heads: KV heads that these query heads read, [C, U].
        part: number of each message's part within the chunk, ascending, [M].
        owner: unit that sends the keys and values of each message, [M].
        user: unit that receives and uses them, [M].
        kv: KV heads in each message, [M].
        sent: tokens of each KV head in each message, [M].
    """

    parts: tuple[int, ...]
    queries: Ints
    keys: Ints | Floats
    received: Ints
    heads: Ints
    kv_heads: Ints
    part: Ints
    owner: Ints
    user: Ints
    kv: Ints
    sent: Ints

    def messages(self, part: int) -> slice:
        """Return the slice of the messages of a part."""
        return slice(self._bounds[part], self._bounds[part + 1])

    @cached_property
    def _bounds(self) -> Ints:
        return np.searchsorted(self.part, np.arange(len(self.keys) + 1))

    @property
    def steps(self) -> Iterator[range]:
        """The numbers of each step's parts within the chunk."""
        ends = list(itertools.accumulate(self.parts, initial=0))
        return (range(*pair) for pair in itertools.pairwise(ends))


def exchange_chunks(
    plan: PlanArrays, window: int | None = None, documents: Sequence[PackedClass] = (ONE_DOCUMENT,)
) -> Iterator[Chunk]:
    """Yield all steps of the exchange, in order.

    Args:
        window: number of latest keys that a query sees, its own key among them; ``None``: no window.
        documents: documents in which a window ends. Without a window, the exchange is that of one document.
    """
    groups, most = plan.starts.shape
    steps = int(plan.groups_beside.max()) - 1
    length = max(1, CHUNK // max(len(plan.tokens), groups * most))
    for first in range(1, steps + 1, length):
        yield _chunk(plan, first, min(length, steps + 1 - first), window, documents)


def _chunk(
    plan: PlanArrays, first: int, count: int, window: int | None, documents: Sequence[PackedClass]
) -> Chunk:
    source, active = _sources(plan.grouping, first, count)
    keys: Ints | Floats
    if window is None:
        queries, keys = _rectangles(plan, source, active)
        received = keys.max(axis=2)
    else:
        queries, keys, received = far_window(plan, source, active, window, documents)
    uses = (received > 0).tobytes()
    # A search asks for few messages of small plans, over and over; those of large plans are too many to keep.
    find = _messages if received.size <= KEPT else _messages.__wrapped__
    part, owner, user, kv, place = find(plan.grouping, first, count, uses)
    heads, kv_heads = (np.broadcast_to(held, (count, len(held))) for held in (plan.heads, plan.kv))
    parts, received_of = (len(plan.part_heads) if first == 1 else 1, *(1,) * (count - 1)), received
    if parts[0] > 1:
        rows = np.repeat(np.arange(count), parts)
        queries, keys, received_of = queries[rows], keys[rows], received[rows]
        heads = np.concatenate([plan.part_heads, heads[1:]])
        kv_heads = np.concatenate([plan.part_kv, kv_heads[1:]])
    sent = received.ravel()[place]
    return Chunk(parts, queries, keys, received_of, heads, kv_heads, part, owner, user, kv, sent)


@lru_cache(maxsize=64)
def _sources(grouping: Grouping, first: int, count: int) -> tuple[Ints, Bools]:
    """Return the group whose keys each group uses, and whether its replica has the step, [steps, N] each."""
    distances = np.arange(first, first + count)[:, None]
    place = np.arange(len(grouping.replica)) - grouping.first_group - distances
    source = grouping.first_group + place % grouping.groups_beside
    return source, distances < grouping.groups_beside


@lru_cache(maxsize=64)
def _messages(grouping: Grouping, first: int, count: int, uses: bytes) -> Ints:
    """Return each message's part, owner, user, KV heads, and index of its tokens in [steps, N]; [5, M].

    `uses` tells whether each group receives anything, as bytes of booleans, [steps, N].
    """
    source, _ = _sources(grouping, first, count)
    used = np.frombuffer(uses, dtype=bool).reshape(source.shape)
    # The first step may travel in parts.
    parts = len(grouping.part_heads) if first == 1 else 1
    step, user_group = np.nonzero(used[parts > 1 :])
    step += parts > 1
    owner_group = source[step, user_group]
    serving = grouping.serving
    classes = grouping.head_class[user_group], grouping.head_class[owner_group]
    repeats = serving.count[classes]
    # For each pair of groups the entries of its pair of classes: first, first + 1, …
    pair = np.repeat(np.arange(len(step)), repeats)
    ends = np.cumsum(repeats)
    entry = serving.first[classes][pair] + np.arange(len(pair)) - (ends - repeats)[pair]
    step, user_group = step[pair], user_group[pair]
    messages = [
        step + parts - 1,
        grouping.slots[grouping.first_slot[owner_group[pair]] + serving.owner[entry]],
        grouping.slots[grouping.first_slot[user_group] + serving.user[entry]],
        serving.kv[entry],
        step * source.shape[1] + user_group,
    ]
    if parts > 1:
        return np.concatenate([_first_step(grouping, source[0], used[0]), messages], axis=1)
    return np.array(messages)


def _first_step(grouping: Grouping, source: Ints, used: Bools) -> Ints:
    """Return the messages of a first step that travels in parts, as `_messages` does."""
    using = np.flatnonzero(used)
    found = [
        serving_in_parts(
            grouping.head_ranges[grouping.head_class[group]],
            grouping.head_ranges[grouping.head_class[source[group]]],
            grouping.queries_per_kv,
            len(grouping.part_heads),
        )
        for group in using
    ]
    user, owner, kv, part = np.concatenate([np.zeros((4, 0), dtype=np.int64), *found], axis=1)
    group = np.repeat(using, [one.shape[1] for one in found])
    owner = grouping.slots[grouping.first_slot[source[group]] + owner]
    user = grouping.slots[grouping.first_slot[group] + user]
    return np.stack([part, owner, user, kv, group])[:, np.argsort(part, kind="stable")]


def _rectangles(plan: PlanArrays, source: Ints, active: Bools) -> tuple[Ints, Ints]:
    """Return the queries and the keys of all rectangles, [steps, N, J] each.

    This is `plan.exchange_blocks` in arrays: neighbours that see the same prefix are one rectangle.
    """
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
