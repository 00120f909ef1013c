"""The plain plan: in proportion, valid for whatever speeds."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.errors import PlanError
from megatron_hexi.plan import Workload, proportional_domain, proportional_plan, validate_plan
from tests.support.plans import examples, workloads

SPEEDS = st.lists(st.lists(st.floats(0.01, 100), min_size=1, max_size=4), min_size=1, max_size=4)


@given(workloads(), st.lists(SPEEDS, min_size=1, max_size=3), st.integers(1, 4))
@examples(150)
def test_any_speeds_give_a_valid_plan(workload, replicas, window):
    plan = proportional_plan(workload, replicas, window)
    validate_plan(plan)
    assert plan.exchange.window == window
    assert [[len(group.members) for group in replica.domain.groups] for replica in plan.replicas] == [
        [len(group) for group in speeds] for speeds in replicas
    ]


@given(workloads(lengths=[10_000]), SPEEDS)
@examples(100)
def test_tokens_and_heads_are_within_one_of_their_share(workload, speeds):
    domain = proportional_domain(workload, speeds)
    everything = sum(map(sum, speeds))
    for group, group_speeds in zip(domain.groups, speeds, strict=True):
        assert abs(group.tokens - workload.seq_length * sum(group_speeds) / everything) <= 1.001
        for member, speed in zip(group.members, group_speeds, strict=True):
            share = speed / sum(group_speeds)
            assert abs(member.tokens - group.tokens * share) <= 1.001
            assert abs(member.heads[1] - member.heads[0] - workload.local_heads * share) <= 1.001


def test_by_hand():
    domain = proportional_domain(Workload(30, 8, 4, 16), [[3, 1], [2]], first_unit=4)
    members = [[(m.lead, m.tokens, m.heads) for m in group.members] for group in domain.groups]
    assert members == [[(4, 15, (0, 6)), (5, 5, (6, 8))], [(6, 10, (0, 8))]]
    assert [group.segments for group in domain.groups] == [((0, 10), (20, 30)), ((10, 20),)]


def test_where_all_see_all_each_group_holds_one_interval():
    domain = proportional_domain(Workload(30, 8, 4, 16, causal=False), [[3, 1], [2]])
    assert [group.segments for group in domain.groups] == [((0, 20),), ((20, 30),)]


@pytest.mark.parametrize("speeds", [[], [[]], [[1], []]])
def test_a_group_without_ranks_is_refused(speeds):
    with pytest.raises(
        PlanError, match=rf"speeds {re.escape(str(speeds))}: give at least one rank in every group"
    ):
        proportional_domain(Workload(8, 2, 2, 4), speeds)


@pytest.mark.parametrize("speed", [0, -1.5, float("nan")])
def test_a_speed_that_is_none_is_refused(speed):
    with pytest.raises(
        PlanError, match=f"speeds: speed number 2 is {speed:g}; .*leave a rank without work out"
    ):
        proportional_domain(Workload(8, 2, 2, 4), [[1, speed]])


@pytest.mark.parametrize("speed", [1e101, float("inf")])
def test_a_speed_beyond_all_measure_is_refused(speed):
    with pytest.raises(
        PlanError, match=re.escape(f"speed number 2 is {speed:g}, too large; speeds are relative")
    ):
        proportional_domain(Workload(8, 2, 2, 4), [[1, speed]])
