"""What memory has room for: against the cost model's own memory of a plan that fills it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost.memory import FRAGMENTATION, Flights, Holdings, stage_memory
from megatron_hexi.planner.bound.pieces.piece import hold_more
from megatron_hexi.planner.fleet.room import Room, fleet_has_room, has_room
from megatron_hexi.planner.fleet.units import find_units
from tests.support.costs import TINY, cluster, tiny_job

GIB = 2.0**30


def memory(job, stage, tokens, attended, heads, several):
    """Bytes of a member, as the cost model counts them."""
    one = np.ones(1)
    flight = one if several else 0 * one
    held = Holdings(
        tokens=tokens * one,
        group_tokens=attended * job.workload().local_heads / heads * one,
        heads=heads * one,
        kv=heads / job.workload().queries_per_kv * one,
        micro_batches=np.ones(1, dtype=np.int64),
        flights=Flights(flight, flight),
    )
    terms = stage_memory(job, stage, held, 1, 8)
    return sum(float(values[0]) for values in terms.values())


@given(
    recompute=st.sampled_from(["none", "selective", "full"]),
    kv_heads=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    last=st.booleans(),
    heads=st.sampled_from([0.25, 1.0, 3.0, 4.0]),
    groups=st.sampled_from([1, 2, 7]),
    part=st.floats(0, 1),
)
def test_what_is_held_and_attended_to_fills_the_memory(
    recompute, kv_heads, pipeline, last, heads, groups, part
):
    job = tiny_job(model=replace(TINY, kv_heads=kv_heads), recompute=recompute, pipeline_parallel=pipeline)
    stage, usable = (pipeline - 1) * last, 64 * GIB
    room = Room(job, stage, usable, 8)

    def used(held, attended):
        return memory(job, stage, held, attended, heads, groups > 1)

    together = room.together(groups)
    assert used(together, together) == pytest.approx(usable, rel=1e-6)
    assert used(room.held_alone(), 0.0) == pytest.approx(usable, rel=1e-6)
    most = room.attended_alone(groups)
    assert used(0.0, most) == pytest.approx(usable, rel=1e-6)
    held = float(room.held(np.array([part * most]), groups)[0])
    assert used(held, part * most) == pytest.approx(usable, rel=1e-6)


def test_memory_that_is_full_at_the_start_has_room_for_nothing():
    room = Room(tiny_job(), 0, 1 * GIB, 8)
    assert room.together(1) == room.held_alone() == room.attended_alone(2) == 0
    assert room.held(np.array([5.0]), 1) < 0


def test_what_is_for_holding_is_a_part_of_both():
    room = Room(tiny_job(), 0, 64 * GIB, 8)
    # At that price, memory is worth as much whatever it is filled with.
    share = room.held_share
    assert 0 < share < 1
    assert share * room.held_alone() == pytest.approx(room.together(2))
    assert (1 - share) * room.attended_alone(2) == pytest.approx(room.together(2))


def test_keys_under_way_take_room_where_there_are_several_groups():
    alone, beside = Room(tiny_job(), 0, 64 * GIB, 8), Room(tiny_job(), 0, 64 * GIB, 8, window=2)
    assert beside.together(1) == alone.together(1)
    assert beside.together(2) < alone.together(2) < alone.together(1)


def test_keys_that_are_received_and_sent_take_room_by_hand():
    # Steps under way and one in use, 2 bytes each of a key and a value; of what is received besides the
    # gradients, in fp32 and in 2 bytes.
    room = Room(tiny_job(), 0, 64 * GIB, 8)
    elements = (1 + FRAGMENTATION) * TINY.kv_heads * TINY.head_dim * tiny_job().micro_batch_size
    for window in (1, 2):
        steps = (window + 1) * 2 * 2
        assert room.each_sent(window) == pytest.approx(steps * elements)
        assert room.each_received(window) == pytest.approx((steps + 2 * (4 + 2)) * elements)


def test_more_is_held_at_the_rate_at_which_prices_make_up_for_it():
    held, attended = np.array([100.0]), np.array([100.0])
    # Four tokens fewer attended to for one more held.
    more, fewer = hold_more(held, attended, 0.8, 120.0)
    assert more == pytest.approx([120])
    assert fewer == pytest.approx([20])
    more, fewer = hold_more(held, attended, 0.8, np.inf)
    assert more == pytest.approx([125])
    assert fewer == pytest.approx([0])


def test_a_sequence_has_room_up_to_what_all_units_hold_and_attend_to():
    room, small = Room(tiny_job(), 0, 64 * GIB, 8), Room(tiny_job(), 0, 8 * GIB, 8)
    length = int(room.together(1) + 2 * small.together(1))

    def fits(stages, length, sequences=1):
        return has_room(replace(tiny_job(), seq_length=length // 2 * 2), stages, sequences)

    stage = [(1, room), (2, small)]
    assert fits([stage], length)
    assert not fits([stage], length + 4)
    assert fits([stage], length // 2, sequences=2)
    assert not fits([stage], length // 2 + 4, sequences=2)
    # Every stage has its part of each token.
    assert not fits([stage, [(3, small)]], length)
    assert fits([stage, [(3, room)]], length)


def test_a_fleet_has_room_for_what_was_planned_on_it_and_not_for_any_length():
    known = cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 1)])
    assert fleet_has_room(find_units(tiny_job(), known))
    assert not fleet_has_room(find_units(tiny_job(seq_length=2**34), known))
