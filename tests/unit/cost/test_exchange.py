"""The exchange in arrays against the split tables; what overlap hides, by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import exchange
from megatron_hexi.cost.exchange import exchange_chunks
from megatron_hexi.cost.layer import message_bytes
from megatron_hexi.cost.mixing import mixing_of
from megatron_hexi.cost.overlap import EntryTimes, ExchangePart, pass_ends
from megatron_hexi.plan import Group, Member, Workload, attention_traffic, build_schedule
from tests.support.costs import TINY, plan_arrays, tiny_job
from tests.support.plans import SPARSE, TORN, examples, one_replica, plans


def steps_of(arrays):
    """The parts of all steps: rectangles, heads, and messages (owner, user, KV heads, tokens)."""
    for chunk in exchange_chunks(arrays):
        for number in range(len(chunk.keys)):
            at = chunk.part == number
            columns = (chunk.owner[at], chunk.user[at], chunk.kv[at], chunk.sent[at])
            messages = sorted(tuple(map(int, row)) for row in zip(*columns, strict=True))
            yield (
                chunk.queries[number],
                chunk.keys[number],
                chunk.heads[number],
                chunk.kv_heads[number],
                messages,
            )


def check_against_schedules(plan):
    arrays = plan_arrays(plan)
    found = list(steps_of(arrays))
    for replica in plan.replicas:
        domain = replica.domain
        ranks = [member.number for member in domain.members]
        schedules = [
            build_schedule(plan.workload, domain, index, plan.exchange.parts) for index in range(len(ranks))
        ]
        for number, (queries, keys, heads, kv_heads, messages) in enumerate(found):
            expected = []
            for rank, schedule in zip(ranks, schedules, strict=True):
                at = next(
                    ((s, part) for s in schedule.steps for part in s.parts if part.number == number), None
                )
                if at is None:  # its part of the step would be empty
                    continue
                step, part = at
                expected += [(ranks[r.peer], rank, r.kv[1] - r.kv[0], r.keys) for r in part.receives]
                assert heads[rank] == part.heads[1] - part.heads[0]
                if part.receives:
                    assert kv_heads[rank] == part.kv[1] - part.kv[0]
                if schedule.own_heads:
                    group = arrays.group[rank]
                    blocks = [(int(q), int(k)) for q, k in zip(queries[group], keys[group], strict=True) if k]
                    assert blocks == [(b.queries[1] - b.queries[0], b.keys[1]) for b in step.blocks]
            assert [m for m in messages if m[1] in ranks] == sorted(expected)
        for rank, schedule in zip(ranks, schedules, strict=True):
            is_cut = schedule.steps or len(schedule.halves) > 1
            first = schedule.spans_in_two[0] if is_cut else schedule.spans
            assert arrays.heads_first[rank] == sum(span.queries[1] - span.queries[0] for span in first)
        assert all(part.number < len(found) for s in schedules for step in s.steps for part in step.parts)


@given(plans(most_replicas=3), st.sampled_from([1, 20, 2**17]))
@examples(200)
def test_steps_are_those_of_the_split_tables(plan, chunk):
    before, exchange.CHUNK = exchange.CHUNK, chunk
    try:
        check_against_schedules(plan)
    finally:
        exchange.CHUNK = before


#: The first step is cut, and has nothing to send.
IDLE = one_replica(
    Workload(16, 4, 2, 4),
    Group(((0, 16),), (Member((0,), 9, (0, 2)), Member((1,), 7, (2, 4)))),
    Group((), (Member((2,), 0, (0, 4)),)),
    parts=2,
)


@pytest.mark.parametrize("plan", [TORN, SPARSE, IDLE])
def test_odd_plans_too(plan):
    check_against_schedules(plan)


@given(plans(most_replicas=2), st.integers(1, 3))
@examples(150)
def test_bytes_are_those_that_the_plan_s_traffic_counts(plan, batch):
    workload = plan.workload
    model = dataclasses.replace(TINY, head_dim=workload.head_dim)
    job = tiny_job(model=model, micro_batch_size=batch, global_batch_size=batch)
    arrays = plan_arrays(plan)
    holder, taker = arrays.all_to_all_pairs
    sent = np.zeros((4, len(arrays.tokens)))
    for move in mixing_of(arrays, job).all_to_alls():
        np.add.at(sent[int(move.way == "backward")], holder if move.inward else taker, move.size)
    for chunk in exchange_chunks(arrays):
        size = message_bytes(arrays, job, chunk)
        np.add.at(sent[2], chunk.owner, size)
        np.add.at(sent[3], chunk.owner, size)
        np.add.at(sent[3], chunk.user, size)
    for replica in plan.replicas:
        for index, member in enumerate(replica.domain.members):
            schedule = build_schedule(workload, replica.domain, index, plan.exchange.parts)
            there, back = attention_traffic(schedule, workload.head_dim, batch, 2)
            assert list(sent[:, member.number]) == [
                there.all_to_all_bytes,
                back.all_to_all_bytes,
                there.message_bytes,
                back.message_bytes,
            ]


def units(*values):
    return np.array(values, dtype=float)


#: Both units send to each other.
BOTH = (np.array([0, 1]), np.array([1, 0]))


def part(compute, there, home=(0, 0)):
    return ExchangePart(np.array([compute, compute], dtype=float), *BOTH, units(*there), units(*home))


def carried_out(backward, window, posted, first, rest, steps):
    """Steps are lists of parts, or the one part of a step."""
    parts = [[part(*one) for one in step] if isinstance(step, list) else [part(*step)] for step in steps]
    nothing = np.zeros(len(posted))
    own = EntryTimes(units(*posted), nothing, units(*first), units(*rest))
    return list(pass_ends(backward, parts, own, window, 1, nothing).whole)


def forward(window, begin, own, steps):
    return carried_out(False, window, begin, own, (0, 0), steps)


def test_transfers_hide_behind_blocks():
    # 10 s of work a block, 4 s a transfer: nothing shows.
    assert forward(1, [0, 0], [10, 10], [([10, 10], [4, 4])] * 3) == [40, 40]


def test_what_does_not_hide_shows():
    # 4 s of work a block, 10 s a transfer: the wire is busy from the start, then the last block.
    assert forward(1, [0, 0], [4, 4], [([4, 4], [10, 10])] * 3) == [34, 34]


def test_a_transfer_waits_for_the_block_that_posts_it():
    # Both ends post the second transfer when block 1 starts, at 10; unit 1 has little to do and waits.
    steps = [([10, 1], [2, 2]), ([10, 1], [2, 2])]
    assert forward(1, [0, 0], [10, 1], steps) == [30, 13]
    # With a window of two it is posted at the start, right behind the first.
    assert forward(2, [0, 0], [10, 1], steps) == [30, 5]


def test_a_late_unit_delays_its_users():
    assert forward(1, [0, 100], [10, 10], [([10, 10], [4, 4])]) == [114, 120]


def test_units_without_messages_do_not_wait():
    steps = [([1, 1, 1], [10, 10])]
    assert carried_out(False, 1, [0, 0, 5], [1, 1, 1], [0, 0, 0], steps) == [11, 11, 7]


def test_of_a_step_in_parts_only_the_first_part_shows():
    # One part of 10 s shows 6 of them: 10, then the block.
    assert forward(1, [0, 0], [4, 4], [([8, 8], [10, 10])]) == [18, 18]
    # Two parts arrive at 5 and 10: the first block runs from 5 to 9, the second from 10 to 14.
    halves = [([4, 4], [5, 5])] * 2
    assert forward(1, [0, 0], [4, 4], [halves]) == [14, 14]
    # The step after it is posted when the first part starts, at 5, behind both parts on the wire: 10 to 20.
    assert forward(1, [0, 0], [4, 4], [halves, ([8, 8], [10, 10])]) == [28, 28]


def backward(window, own, steps, last=(0, 0)):
    return carried_out(True, window, [0, 0], own, last, steps)


def test_the_last_gradients_are_waited_for():
    # Blocks end at 10, 20, 30; the last gradients take 4 s more.
    assert backward(1, [10, 10], [([10, 10], [4, 4], [4, 4])] * 2) == [34, 34]


def test_the_last_gradients_hide_behind_the_rest_of_the_own_block():
    # The first part ends at 5, the block at 15; gradients are home at 19, and the last part ends at 20.
    assert backward(1, [5, 5], [([10, 10], [4, 4], [4, 4])], last=[5, 5]) == [20, 20]
    # All of it first: gradients leave at 20 and show.
    assert backward(1, [10, 10], [([10, 10], [4, 4], [4, 4])]) == [24, 24]
    # Blocks end at 8, 18, 28, gradients are home at 32; the last 2 s of work hide 2 s of them.
    assert backward(1, [8, 8], [([10, 10], [4, 4], [4, 4])] * 2, last=[2, 2]) == [32, 32]
    # Keys need longer than the first part, 7 s; then the block until 17, and the last part until 22.
    assert backward(1, [5, 5], [([10, 10], [7, 7], [4, 4])], last=[5, 5]) == [22, 22]
    # Unit 1 is done with its last part at 11, but gradients travel from 15, when unit 0 has its own, to 19.
    assert backward(1, [5, 5], [([10, 1], [4, 4], [4, 4])], last=[5, 5]) == [20, 19]


def test_gradients_of_a_part_leave_when_its_block_is_done():
    # Parts arrive at 2 and 4; blocks end at 10 and 15; gradients travel 10 to 14 and 15 to 19.
    parts = [([5, 5], [2, 2], [4, 4])] * 2
    assert backward(1, [5, 5], [parts]) == [19, 19]
    assert backward(1, [5, 5], [parts], last=[5, 5]) == [20, 20]
    # As one part they leave at 15 and take 8 s.
    assert backward(1, [5, 5], [([10, 10], [4, 4], [8, 8])], last=[5, 5]) == [23, 23]


def test_keys_and_gradients_share_the_wire():
    # No work to hide behind: two transfers there, two back, one after the other.
    assert backward(1, [0, 0], [([0, 0], [5, 5], [7, 7])] * 2) == [24, 24]
    # The third keys go behind the first gradients: 5 5 7 5 7 7.
    assert backward(1, [0, 0], [([0, 0], [5, 5], [7, 7])] * 3) == [36, 36]


@given(
    st.integers(1, 3),
    st.lists(st.lists(st.floats(0, 10), min_size=6, max_size=6), min_size=1, max_size=6),
    st.floats(0, 5),
)
@examples(100)
def test_slower_work_or_wires_never_end_earlier(window, rows, more):
    def run(extra_work, extra_wire):
        extra = [extra_work] * 2 + [extra_wire] * 4
        steps = [np.add(row, extra).reshape(3, 2) for row in rows]
        return np.array(backward(window, [1, 2], steps, last=[3, 1]))

    assert (run(more, 0) >= run(0, 0) - 1e-9).all()
    assert (run(0, more) >= run(0, 0) - 1e-9).all()
    work = sum(units(*row[:2]) for row in rows) + units(4, 3)
    assert (run(0, 0) >= work - 1e-9).all()
