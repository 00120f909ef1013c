"""Memory that heads and tokens of a group share: by hand, and against every deal of a few heads."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.planner.bound.groups.group_memory import GroupMemory

HEADS = 4


def memory_of(rooms, each, tokens):
    """One stage, one size of the group."""
    size = np.array([float(tokens)])
    return GroupMemory([rooms], [np.array([float(each)])], HEADS, size, size)


def held(*tokens):
    return [np.array([float(most)]) for most in tokens]


def test_where_there_is_plenty_only_time_limits_a_site():
    here, elsewhere = memory_of([1000, 500], 10, 90).capacities(0, held(70, 40))
    assert here == pytest.approx([70])
    assert elsewhere == pytest.approx([40])


def test_heads_take_the_room_of_tokens_on_their_site_by_hand():
    memory = memory_of([100, 50], 10, 90)
    here, elsewhere = memory.capacities(0, held(1000, 1000))
    # The others have the rest of the heads.
    assert here[:, 0] == pytest.approx([100, 90, 80, 70, 60])
    assert elsewhere[:, 0] == pytest.approx([10, 20, 30, 40, 50])
    assert memory.capacities(0, held(75, 30))[0][:, 0] == pytest.approx([75, 75, 75, 70, 60])
    assert memory.capacities(0, held(75, 30))[1][:, 0] == pytest.approx([10, 20, 30, 30, 30])


def test_the_scarcest_stage_counts():
    size = np.array([90.0])
    memory = GroupMemory([[100, 80], [90, 100]], [np.array([10.0]), np.array([5.0])], HEADS, size, size)
    here, elsewhere = memory.capacities(0, held(1000, 1000))
    assert here[:, 0] == pytest.approx([90, 85, 80, 70, 60])
    assert elsewhere[:, 0] == pytest.approx([40, 50, 60, 70, 80])


def best_deal(rooms, each, tokens, most, costs):
    """The least of the longest site's seconds, over all deals of heads that leave room for the tokens."""
    found = np.inf
    for deal in itertools.product(range(HEADS + 1), repeat=len(rooms)):
        free = [min(m, room - each * heads) for m, room, heads in zip(most, rooms, deal, strict=True)]
        if sum(deal) == HEADS and min(free) >= 0 and sum(free) >= tokens:
            found = min(found, max(float(cost[heads, 0]) for cost, heads in zip(costs, deal, strict=True)))
    return found


SITE = st.tuples(
    st.floats(0, 200), st.floats(0, 200), st.lists(st.floats(0, 10), min_size=HEADS, max_size=HEADS)
)


@given(sites=st.lists(SITE, min_size=1, max_size=3), each=st.floats(0.5, 50), tokens=st.floats(1, 300))
def test_no_deal_of_heads_is_faster(sites, each, tokens):
    rooms, most = [room for room, _, _ in sites], [most for _, most, _ in sites]
    # More heads take no less time; none take nothing.
    costs = [np.cumsum([0.0, *steps])[:, None] for _, _, steps in sites]
    every = np.sort(np.concatenate([cost[1:] for cost in costs]), axis=0)
    found = memory_of(rooms, each, tokens).dealt(every[HEADS - 1], costs, held(*most))
    best = best_deal(rooms, each, tokens, most, costs)
    assert found[0] >= every[HEADS - 1][0] - 1e-9
    assert found[0] <= best + 1e-9


def test_full_memory_sends_heads_where_there_is_room_by_hand():
    # Both tokens and heads would go to the first site; beside its 90 tokens there is room for one head.
    costs = [np.arange(HEADS + 1.0)[:, None], 5 * np.arange(HEADS + 1.0)[:, None]]
    tight, wide = memory_of([100, 50], 10, 90), memory_of([1000, 50], 10, 90)
    first = np.array([4.0])
    assert wide.dealt(first, costs, held(90, 0)) == pytest.approx(4)
    # Three of four heads on the second.
    assert tight.dealt(first, costs, held(90, 0)) == pytest.approx(15)
    assert memory_of([80, 5], 10, 90).dealt(first, costs, held(90, 90))[0] == np.inf
