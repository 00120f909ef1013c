"""Attention in a window against brute force over positions, and against the split tables."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import exchange
from megatron_hexi.cost.compute import device_speeds, own_block_times
from megatron_hexi.cost.exchange import exchange_chunks
from megatron_hexi.cost.layer import message_bytes
from megatron_hexi.cost.layer_bytes import Flights, working_set_bytes
from megatron_hexi.cost.windows import own_pairs
from megatron_hexi.kinds import Window
from megatron_hexi.plan import Mask, attention_traffic, build_schedule
from tests.support.costs import TINY, cluster, plan_arrays, tiny_job
from tests.support.plans import RAGGED, RANDOMS, SPARSE, TORN, examples, plans, workloads


@st.composite
def causal_plans(draw, value_dims=(None,), most_replicas=2):
    """A plan whose tokens see earlier ones, and a window."""
    workload = dataclasses.replace(draw(workloads(value_dims=value_dims)), causal=True)
    plan = draw(plans(st.just(workload), most_replicas=most_replicas))
    random = draw(RANDOMS)
    window = random.choice([1, 2, random.randint(1, 13), random.randint(1, 1 + 2 * workload.seq_length)])
    return plan, window


def positions(group):
    return np.concatenate([np.arange(*one) for one in group.segments] or [np.zeros(0, dtype=int)])


def visible(queries, keys, window):
    """Whether each query sees each key, [queries, keys]."""
    behind = queries[:, None] - keys
    return (behind >= 0) & (behind < window)


def groups_of(plan):
    return [group for replica in plan.replicas for group in replica.domain.groups]


def far_groups(plan):
    """For each step: the number of each group that takes part, and of the one whose keys it uses."""
    first, steps = 0, dict[int, list[tuple[int, int]]]()
    for replica in plan.replicas:
        count = len(replica.domain.groups)
        for distance in range(1, count):
            pairs = [(first + place, first + (place - distance) % count) for place in range(count)]
            steps.setdefault(distance, []).extend(pairs)
        first += count
    return steps


@given(causal_plans(), st.sampled_from([1, 20, 2**17]))
@examples(200)
def test_pairs_are_those_that_positions_say(drawn, chunk):
    plan, window = drawn
    arrays, groups = plan_arrays(plan), [positions(group) for group in groups_of(plan)]
    assert list(own_pairs(arrays, window)) == [visible(own, own, window).sum() for own in groups]
    before, exchange.CHUNK = exchange.CHUNK, chunk
    try:
        chunks = list(exchange_chunks(arrays, window))
    finally:
        exchange.CHUNK = before
    # Parts of a step see the same keys; the first is asked.
    found = [(each, step[0]) for each in chunks for step in each.steps]
    for distance, pairs in far_groups(plan).items():
        each, part = found[distance - 1]
        for group, source in pairs:
            seen = visible(groups[group], groups[source], window)
            queries, keys = each.queries[part, group], each.keys[part, group]
            assert (queries * keys).sum() == pytest.approx(seen.sum())
            assert each.received[part, group] == seen.any(axis=0).sum()
            # A segment's queries are counted once at most, and each that sees any key.
            for segment, rows in enumerate(runs(groups[group])):
                assert seen[rows].any(axis=1).sum() <= queries[segment] <= len(rows)


def runs(own):
    """Indices of each run of consecutive positions."""
    return np.split(np.arange(len(own)), np.flatnonzero(np.diff(own) > 1) + 1)


@given(causal_plans(value_dims=(None, 2, 9)), st.integers(1, 3))
@examples(200)
def test_messages_and_bytes_are_those_of_the_split_tables(drawn, batch):
    plan, window = drawn
    check_against_schedules(plan, window, batch)


@pytest.mark.parametrize("plan", [TORN, SPARSE, RAGGED])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 40])
def test_odd_plans_too(plan, window):
    check_against_schedules(plan, window, 1)


def check_against_schedules(plan, window, batch):
    workload, arrays = plan.workload, plan_arrays(plan)
    model = dataclasses.replace(
        TINY,
        head_dim=workload.head_dim,
        heads=workload.heads,
        kv_heads=workload.kv_heads,
        window=Window(window),
    )
    job = tiny_job(model=model, micro_batch_size=batch, global_batch_size=batch)
    # The columns of keys and values are all that messages ask of a model.
    columns = (workload.head_dim + workload.value_size) / (2 * workload.head_dim)
    sent, messages = np.zeros((2, len(arrays.tokens))), []
    for chunk in exchange_chunks(arrays, window):
        size = message_bytes(arrays, job, chunk) * columns
        np.add.at(sent[0], chunk.owner, size)
        np.add.at(sent[1], chunk.owner, size)
        np.add.at(sent[1], chunk.user, size)
        rows = zip(chunk.owner, chunk.user, chunk.kv, chunk.sent, strict=True)
        messages += [tuple(map(int, row)) for row in rows]
    expected = []
    for replica in plan.replicas:
        ranks = [member.number for member in replica.domain.members]
        for index, rank in enumerate(ranks):
            schedule = build_schedule(
                workload, replica.domain, index, plan.exchange.parts, Mask(window=window - 1)
            )
            sizes = workload.head_dim, batch, 2, workload.value_size
            assert sent[0, rank] == pytest.approx(attention_traffic(schedule, *sizes).forward.message_bytes)
            assert sent[1, rank] == pytest.approx(attention_traffic(schedule, *sizes).backward.message_bytes)
            for step in schedule.steps:
                expected += [(ranks[r.peer], rank, r.kv[1] - r.kv[0], r.keys) for r in step.receives]
    assert sorted(messages) == sorted(expected)


@given(causal_plans())
@examples(50)
def test_a_window_as_long_as_the_sequence_is_none(drawn):
    plan, _ = drawn
    arrays = plan_arrays(plan)
    for wide, plain in zip(
        exchange_chunks(arrays, plan.workload.seq_length), exchange_chunks(arrays), strict=True
    ):
        assert wide.received.tolist() == plain.received.tolist()
        areas = [(one.queries * one.keys).sum(axis=2) for one in (wide, plain)]
        assert areas[0] == pytest.approx(areas[1])


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize(("context", "size"), [(1, 1), (7, 3), (12, 4), (13, 4), (9, 20), (64, 63)])
def test_keys_seen_by_hand(context, size, in_chunks):
    seen = Window(size, in_chunks=in_chunks).keys_seen(context)
    queries = np.arange(context)
    first = queries - queries % size if in_chunks else np.maximum(0, queries - size + 1)
    # As elsewhere a query sees half of itself: areas of triangles are n^2 / 2.
    assert seen * context == pytest.approx((queries - first + 0.5).sum())


def test_a_window_s_edge_by_hand():
    (node,) = cluster([("a", "PLAIN", 1)]).nodes
    plain = tiny_job(model=dataclasses.replace(TINY, kv_heads=2))
    job = dataclasses.replace(plain, model=dataclasses.replace(plain.model, window=Window(100)))
    speeds, tokens = device_speeds(node.device, job), np.array([60.0, 100.0, 1000.0])
    times = own_block_times(speeds, job, tokens, True)
    areas = np.array([60**2 / 2, 100**2 / 2, 99.5 * 1000 - 100 * 99 / 2])
    # Of 900 queries: two outputs added up, a copied query; half of a copied key and value.
    edge = np.array([0, 0, 900 * 2 * 128 * (3 + 2 + 2)]) / 900e9
    assert times.forward == pytest.approx(4 * 128 * areas / 100e12 + edge)
    edge = np.array([0, 0, 900 * 2 * 128 * (5 + 4 + 5)]) / 900e9
    assert times.backward == pytest.approx(2.5 * 4 * 128 * areas / 100e12 + edge)


def test_what_a_window_s_edge_needs_by_hand():
    plain = tiny_job()
    job = dataclasses.replace(plain, model=dataclasses.replace(TINY, window=Window(100)))
    none = Flights(np.zeros(2), np.zeros(2))
    tokens, heads, kv = np.array([100.0, 200.0]), np.array([3.0, 3.0]), np.array([2.0, 2.0])
    sizes = (tokens, tokens, heads, kv, none, 1)
    more = working_set_bytes(job, *sizes) - working_set_bytes(plain, *sizes)
    # Gradients of 3 + 4 heads that wait, three times; rows of query, output and gradient, keys and values.
    assert list(more) == [0, 2 * 128 * 200 * (3 * 7 + 9 + 4)]
    exchanging = Flights(np.array([0.0, 50.0]), np.array([0.0, 50.0]))
    sizes = (tokens, tokens, heads, kv, exchanging, 1)
    more = working_set_bytes(job, *sizes) - working_set_bytes(plain, *sizes)
    assert list(more) == [0, 2 * 128 * 200 * (9 + 4)]
