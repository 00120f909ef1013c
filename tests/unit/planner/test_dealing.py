"""Whole heads and tokens dealt out exactly; the balance of a grouping, by hand where it can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.deal import assign_heads, assign_in_turn, assign_tokens
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.search.balance import balance, rebalanced
from megatron_hexi.planner.search.guess import FirstGuess
from tests.support.brute import compositions
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import device_text, read_text
from tests.support.plans import examples

SECONDS = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)
FAST = 1e6  # GB/s: a network that takes no time


def longest(heads, seconds):
    return max(count * cost for count, cost in zip(heads, seconds, strict=True))


# Heads


@given(st.integers(0, 8), SECONDS)
@examples(200)
def test_no_other_way_to_deal_heads_ends_earlier(heads, seconds):
    dealt = assign_heads(heads, seconds)
    assert sum(dealt) == heads
    best = min(longest(other, seconds) for other in compositions(heads, len(seconds)))
    assert longest(dealt, seconds) == best


@given(st.integers(0, 8), SECONDS, st.data())
@examples(200)
def test_nor_under_caps(heads, seconds, data):
    caps = data.draw(st.lists(st.integers(0, 8), min_size=len(seconds), max_size=len(seconds)))
    dealt = assign_heads(heads, seconds, caps)
    assert sum(dealt) == heads
    if sum(caps) < heads:  # caps give way
        assert all(count >= cap for count, cap in zip(dealt, caps, strict=True))
        return
    allowed = [
        other
        for other in compositions(heads, len(seconds))
        if all(count <= cap for count, cap in zip(other, caps, strict=True))
    ]
    assert dealt in allowed
    assert longest(dealt, seconds) == min(longest(other, seconds) for other in allowed)


@given(st.integers(0, 5), SECONDS, st.data())
@examples(200)
def test_nor_with_one_at_least_and_a_time_before_the_first(more, seconds, data):
    fills = data.draw(st.lists(st.floats(0, 10), min_size=len(seconds), max_size=len(seconds)))
    times = [lambda n, a=a, b=b: a + n * b for a, b in zip(fills, seconds, strict=True)]
    count = len(seconds) + more

    def ends(dealt):
        return max(time(n) for time, n in zip(times, dealt, strict=True))

    dealt = assign_in_turn(count, times, least=1)
    assert sum(dealt) == count
    assert min(dealt) >= 1
    assert ends(dealt) == min(ends(other) for other in compositions(count, len(seconds)) if min(other) >= 1)


def test_heads_by_hand():
    assert assign_heads(4, [1.0, 0.5]) == (1, 3)
    assert assign_heads(8, [1.0, 1.0, 1.0]) == (3, 3, 2)
    assert assign_heads(3, [1.0, 100.0]) == (3, 0)
    assert assign_heads(4, [1.0, 0.5], [4, 2]) == (2, 2)
    assert assign_heads(4, [1.0, 1.0], [0, 1]) == (2, 2)  # one under the caps; the other three as without any


# Tokens


@given(st.integers(0, 10_000), st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(any))
@examples(200)
def test_tokens_are_within_one_of_their_share(tokens, weights):
    dealt = assign_tokens(tokens, np.array(weights))
    assert sum(dealt) == tokens
    for count, weight in zip(dealt, weights, strict=True):
        assert abs(count - tokens * weight / sum(weights)) <= 1.001
        assert count >= 0


@given(st.integers(0, 10_000), st.data())
@examples(200)
def test_what_a_cap_cuts_off_goes_to_the_others_in_proportion(tokens, data):
    size = data.draw(st.integers(1, 5))
    weights = np.array(data.draw(st.lists(st.floats(0.1, 10), min_size=size, max_size=size)))
    caps = np.array(data.draw(st.lists(st.floats(0, 10_000), min_size=size, max_size=size)))
    dealt = np.array(assign_tokens(tokens, weights, caps))
    assert dealt.sum() == tokens
    if caps.sum() <= tokens:  # caps give way, all by the same factor
        if caps.sum() > 0:
            assert np.abs(dealt - tokens * caps / caps.sum()).max() <= 1.001
        return
    assert (dealt <= caps + 1.001).all()
    # Who is below its cap has as much of its weight as anybody, rounding aside.
    rates = dealt / weights
    for member in np.flatnonzero(dealt < caps - 1.001):
        assert (rates - 1.001 / weights <= rates[member] + 1.001 / weights[member]).all()


def test_tokens_by_hand():
    assert assign_tokens(12, np.array([1.0, 2.0, 3.0])) == (2, 4, 6)
    assert assign_tokens(12, np.array([1.0, 2.0, 3.0]), np.array([100.0, 100.0, 3.0])) == (3, 6, 3)
    assert assign_tokens(12, np.array([1.0, 1.0]), np.array([2.0, 4.0])) == (4, 8)
    assert assign_tokens(0, np.array([0.0, 1.0])) == (0, 1 - 1)
    assert assign_tokens(10, np.array([0.0, 1.0]), np.array([20.0, 4.0])) == (
        6,
        4,
    )  # rather than overfill one


# The balance of a grouping


def fleet_of(nodes, job=None, **network):
    return find_units(job or tiny_job(), cluster(nodes, **network))


def test_first_layout_by_hand():
    # DOUBLE does attention twice as fast; token work not quite, since both have the same memory.
    fleet = fleet_of([("a", "PLAIN", 1), ("b", "DOUBLE", 1)])
    rates = Rates(fleet)
    assert [kind.name for kind in fleet.kinds] == ["DOUBLE", "PLAIN"]
    assert rates.attention[0] == pytest.approx(2 * rates.attention[1])
    assert 1.45 < rates.token[0] / rates.token[1] < 2
    (part,) = FirstGuess(fleet, rates).layout(((0, 1),), 1).parts
    assert part.heads == (3, 1)
    assert part.tokens[0] == pytest.approx(4096 * rates.token[0] / rates.token.sum(), abs=1)
    one, other = FirstGuess(fleet, rates).layout(((0,), (1,)), 3).parts
    assert (one.heads, other.heads) == ((4,), (4,))
    speeds = [1 / (1 / rates.token[unit] + 4 / rates.attention[unit]) for unit in range(2)]
    assert one.total == pytest.approx(4096 * speeds[0] / sum(speeds), abs=1)


GROUPINGS = [((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1), (2,), (3,)), ((0, 2), (1, 3))]


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_where_nothing_travels_all_groups_end_at_once(grouping):
    job = tiny_job(seq_length=2**16)
    fleet = fleet_of([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], job, bandwidth=FAST)
    judge, rates = Judge(fleet), Rates(fleet)
    first = judge.try_out(fleet, [FirstGuess(fleet, rates).layout(grouping, 1)], 2)
    trial = balance(judge, rates, first, 5)
    assert trial.order <= first.order
    if grouping == ((0, 1), (2, 3)):
        return  # inside a node all-to-alls take time
    # All passes of a layer: of each group what its busiest member takes.
    (stage,) = trial.timing.stages
    busy = np.sum([one.undisturbed for one in stage.passes], axis=0)
    longest_of = [busy[trial.timing.arrays.group == group].max() for group in range(len(grouping))]
    assert max(longest_of) / min(longest_of) < 1.01


def test_members_of_a_group_end_their_tokens_at_once():
    fleet = fleet_of([("a", "DOUBLE", 1), ("b", "PLAIN", 1)], tiny_job(seq_length=2**16), bandwidth=FAST)
    judge, rates = Judge(fleet), Rates(fleet)
    trial = balance(judge, rates, judge.try_out(fleet, [FirstGuess(fleet, rates).layout(((0, 1),), 1)], 2), 5)
    (stage,) = trial.timing.stages
    token = sum(one.token for one in stage.passes) + stage.last.busy / stage.layers
    assert token[0] == pytest.approx(token[1], rel=1e-3)
    assert trial.layouts[0].parts[0].heads == (3, 1)


def test_balancing_a_balanced_layout_leaves_it():
    fleet = fleet_of([("a", "PLAIN", 4)], bandwidth=FAST)
    judge, rates = Judge(fleet), Rates(fleet)
    trial = judge.try_out(fleet, [FirstGuess(fleet, rates).layout(((0, 1, 2, 3),), 1)], 2)
    assert trial.layouts[0].parts[0].tokens == (1024,) * 4
    assert rebalanced(rates, trial) == trial.layouts[0]
    assert balance(judge, rates, trial, 5) is trial
    assert judge.trials == 1


def test_a_slow_way_to_the_network_shifts_work_away():
    # What the links take counts: a group with slow all-to-alls gets fewer tokens than its GPUs could do.
    job = tiny_job(seq_length=2**14)
    fleet = fleet_of([("a", "PLAIN", 2), ("b", "PLAIN", 1), ("c", "PLAIN", 1)], job, bandwidth=2)
    assert fleet.sites == ((0, 1), (2,), (3,))
    judge, rates = Judge(fleet), Rates(fleet)
    trial = judge.try_out(fleet, [FirstGuess(fleet, rates).layout(((0, 1), (2, 3)), 1)], 2)
    near, far = trial.layouts[0].parts
    assert near.total == far.total
    balanced = balance(judge, rates, trial, 5)
    near, far = balanced.layouts[0].parts
    assert near.total > 1.2 * far.total
    assert balanced.iteration_s < trial.iteration_s


def test_memory_caps_tokens():
    text = (
        "name: caps\nnodes:\n- {name: a, gpu: A, gpus: 1}\n- {name: b, gpu: B, gpus: 1}\n"
        "network: {bandwidth_gb_s: 100, latency_us: 0, per: gpu}\n"
        f"devices:\n{device_text('A', 100, 100)}{device_text('B', 100, 100, memory=4)}"
    )
    fleet = find_units(tiny_job(seq_length=2**17), read_text(text))
    judge, rates = Judge(fleet), Rates(fleet)
    halves = Layout((A2AGroup((0,), (2**16,), (4,)), A2AGroup((1,), (2**16,), (4,))), 1)
    first = judge.try_out(fleet, [halves], 1)
    assert not first.fits
    balanced = balance(judge, rates, first, 6)
    assert balanced.fits
    (small,) = np.flatnonzero(balanced.timing.usable[0] == 4 * 2**30)
    # No more is shifted than must be.
    assert balanced.timing.needed[0][small] > 0.95 * 4 * 2**30
    assert balanced.timing.arrays.tokens[small] < 2**16
    # The first guess knows of memory too, if roughly.
    guess = judge.try_out(fleet, [FirstGuess(fleet, rates).layout(((0,), (1,)), 1)], 1)
    assert guess.excess < 0.1
    assert guess.timing.arrays.tokens[small] > 0.9 * balanced.timing.arrays.tokens[small]
