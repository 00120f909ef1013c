"""Whole micro-batches go to the domain that is predicted to be free first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan.shares import assign_in_turn
from tests.support.plans import examples

COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def test_a_domain_of_three_and_one_of_one_take_turns():
    assert assign_in_turn([3, 1]) == ((0, 2, 3), (1,))
    assert assign_in_turn([1, 3]) == ((1,), (0, 2, 3))
    assert assign_in_turn([2, 2]) == ((0, 2), (1, 3))
    assert assign_in_turn([4]) == ((0, 1, 2, 3),)


@examples(60)
@given(counts=COUNTS)
def test_each_micro_batch_is_dealt_once_and_each_domain_gets_what_it_takes(counts):
    dealt = assign_in_turn(counts)
    assert [len(own) for own in dealt] == counts
    assert sorted(number for own in dealt for number in own) == list(range(sum(counts)))
    assert all(list(own) == sorted(own) for own in dealt)


@examples(60)
@given(counts=COUNTS)
def test_nobody_waits_while_another_takes_two_more_turns(counts):
    # A domain of n micro-batches is busy 1 / n of the time with each: all begin together and end together.
    taken = [0] * len(counts)
    owner = {number: domain for domain, own in enumerate(assign_in_turn(counts)) for number in own}
    for number in range(sum(counts)):
        taken[owner[number]] += 1
        for domain, count in enumerate(counts):
            assert abs(taken[domain] / count - (number + 1) / sum(counts)) <= 1
            if taken[domain] < count:
                begun = (taken[owner[number]] - 1) / counts[owner[number]]
                assert begun <= taken[domain] / count
