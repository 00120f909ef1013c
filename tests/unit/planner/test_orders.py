"""Who follows whom: members keep what they take, kinds are spread over the heads, and keys with them."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout
from megatron_hexi.planner.layouts.orders import alternating, facing, in_a_row, other_orders
from megatron_hexi.planner.layouts.trial import Judge
from tests.support.costs import cluster, tiny_job

NODES = [("fast", "DOUBLE", 8), ("slow", "PLAIN", 4)]


def mixed_fleet(**job):
    return find_units(tiny_job(**job), cluster(NODES))


def heads_in_common(trial):
    """Of each unit of the outer group: heads that ranks from 4 on, which are slow, have in the inner one."""
    outer, inner = trial.plan.replicas[0].domain.groups
    slow = [of.heads for of in inner.members if of.number >= 4]
    return [
        sum(max(0, min(one.heads[1], stop) - max(one.heads[0], start)) for start, stop in slow)
        for one in outer.members
    ]


def parts_of(seed):
    chance, units = Random(seed), list(range(12))
    chance.shuffle(units)
    ends = sorted(chance.sample(range(1, 12), chance.randint(1, 4)))
    groups = [units[low:high] for low, high in zip([0, *ends], [*ends, 12], strict=True)]
    return tuple(
        A2AGroup(tuple(group), *(tuple(chance.randint(0, 9) for _ in group) for _ in range(2)))
        for group in groups
    )


def taken(part):
    return sorted(zip(part.units, part.tokens, part.heads, strict=True))


@given(st.integers(0, 10**6))
def test_members_keep_what_they_take(seed):
    fleet, parts = mixed_fleet(), parts_of(seed)
    for reordered in (facing(fleet, parts), in_a_row(parts)):
        assert [taken(part) for part in reordered] == [taken(part) for part in parts]
    assert all(part.units == tuple(sorted(part.units)) for part in in_a_row(parts))
    assert sorted(alternating(fleet, parts), key=parts.index) == list(parts)
    same_members, *by_size = other_orders(parts)
    assert same_members == in_a_row(parts)
    for one, way in zip(by_size, (-1, 1), strict=True):
        assert sorted(one, key=parts.index) == list(parts)
        totals = [part.total for part in one]
        assert totals == sorted(totals, key=lambda total: way * total)


@given(st.integers(0, 10**6))
def test_each_kind_is_spread_evenly_over_the_heads(seed):
    fleet, parts = mixed_fleet(), parts_of(seed)
    before = [fleet.kinds_of(part.units) for part in parts]
    for kinds, part in zip(before, facing(fleet, parts), strict=True):
        if len(set(before)) == 1:
            continue
        for kind, count in Counter(kinds).items():
            met = 0
            for place, unit in enumerate(part.units, start=1):
                met += fleet.units[unit].kind == kind
                # Two kinds: each is half a member off at most, and the other one as much.
                assert abs(met - place * count / len(kinds)) <= 1


def test_groups_that_are_alike_stay_as_they_are():
    fleet = mixed_fleet()
    parts = tuple(A2AGroup((2 * n, 8 + n), (1, 1), (3, 1)) for n in range(4))
    assert facing(fleet, parts) == parts
    assert facing(fleet, parts[:1]) == parts[:1]


def test_keys_of_slow_members_go_to_all_and_not_to_one():
    # Two fast units have two of four heads each; beside them two fast units and two slow ones, one head each.
    fleet = mixed_fleet(seq_length=2**13)
    judge = Judge(fleet)
    parts = A2AGroup((0, 1), (2**11,) * 2, (2, 2)), A2AGroup((2, 3, 8, 9), (2**10,) * 4, (1,) * 4)
    plain, spread = (judge.try_out(fleet, [Layout(one, 1)], 1) for one in (parts, facing(fleet, parts)))
    assert heads_in_common(plain) == [0, 2]
    assert heads_in_common(spread) == [1, 1]
    # The network has 10 GB/s a GPU: half the keys take half the time.
    assert spread.timing.phases.exchange < 0.6 * plain.timing.phases.exchange
    assert spread.iteration_s < plain.iteration_s
