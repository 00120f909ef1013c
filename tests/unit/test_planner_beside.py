"""Tokens of groups beside each other, by hand. That no layout is ruled out: test_planner_together.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.planner.bound.groups.group_times import GroupTimes
from megatron_hexi.planner.bound.pieces.prices import token_prices
from megatron_hexi.planner.bound.site_classes import classes_of, sites_of
from megatron_hexi.planner.bound.waiting.beside import Beside
from megatron_hexi.planner.bound.waiting.setting import Setting
from megatron_hexi.planner.fleet.units import find_units
from tests.support.costs import TINY, cluster, tiny_job

LENGTH, HEADS = 4096, 4
KEY_BYTES = 2 * HEADS * TINY.head_dim * 2
GB_S = 10e9
#: On two nodes: all of one, half of one, a GPU of each.
WHOLE, HALF, BOTH = ((0, 4),), ((0, 2),), ((0, 1), (1, 1))
ELSEWHERE = ((1, 4),)
SHAPES = [WHOLE, HALF, BOTH, ELSEWHERE]


def beside(longest_s, most=LENGTH, **job):
    fleet = find_units(tiny_job(seq_length=LENGTH, **job), cluster([("a", "PLAIN", 4), ("b", "DOUBLE", 4)]))
    classes = classes_of(sites_of(fleet, True, token_prices(fleet)))
    alone = GroupTimes(fleet.job, classes, SHAPES, 1, (2, 2), (0.0, longest_s), True)
    setting = Setting(fleet.job, classes, True, alone, longest_s)
    return Beside([setting], SHAPES, np.full(len(SHAPES), float(most)), 2), setting


def test_seconds_of_a_token_by_hand():
    found, setting = beside(1.0)
    # Half of the keys of a group are seen by another one: over all lanes of the thinner side.
    assert found._between(0, 3) == pytest.approx((KEY_BYTES / 2 / (4 * GB_S),) * 2)
    assert found._between(1, 3) == pytest.approx((KEY_BYTES / 2 / (2 * GB_S),) * 2)
    # Both of its sites get what they have heads for at once; inside the node that is faster.
    inside = setting.bandwidth((0, 1), (0, 2))
    assert found._between(2, 1)[0] == pytest.approx(KEY_BYTES / 2 / (GB_S + inside))
    # The other one may have the same heads on the same node: nothing is known.
    assert found._between(1, 2)[0] == 0
    assert found._between(2, 1)[1] == 0
    # No room for both on a node: all keys cross.
    assert found._between(2, 3) == pytest.approx((KEY_BYTES / 2 / (2 * GB_S), KEY_BYTES / 2 / (4 * GB_S)))


def test_a_pair_over_a_thin_link_needs_the_time_for_all_keys():
    # 4096 tokens' keys, forward twice and backward there and back, of which one way half is seen.
    keys_s = 4 * LENGTH / 2 * KEY_BYTES / 2 / (4 * GB_S)
    for often, may in ((0.99, False), (4.0, True)):
        found, _ = beside(keys_s * often, recompute="full")
        assert (found.most([0, 3]) is not None) == may, often


def test_what_the_others_hold_at_most_bounds_a_group():
    found, _ = beside(1.0, most=LENGTH / 2 - 1)
    assert found.most([0, 3]) is None
    found, _ = beside(1.0, most=LENGTH / 2)
    assert found.most([0, 3]) == pytest.approx([LENGTH / 2] * 2)


@given(st.integers(0, 10_000))
def test_keys_arrive_no_faster_than_by_the_fastest_links(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 5))
    least = random.uniform(0, 1, count)
    most = least + random.uniform(0, 1, count)
    each = random.uniform(0, 1, count)
    order = sorted(zip(each.tolist(), range(count), strict=True))
    held = random.uniform(least, most, (50, count))
    arriving = Beside._arriving(order, least.tolist(), most.tolist(), held.sum(axis=1))
    assert (arriving <= held @ each + 1e-9).all()
    ends = Beside._arriving(order, least.tolist(), most.tolist(), np.array([least.sum(), most.sum()]))
    assert ends == pytest.approx([least @ each, most @ each])
