"""Keys that cross from site to site between groups, against counting them head by head."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hexi.planner.bound.groups.group_times import GroupTimes
from megatron_hexi.planner.bound.pieces.prices import token_prices
from megatron_hexi.planner.bound.site_classes import classes_of, sites_of
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.key_times import KeyTimes
from megatron_hexi.planner.bound.waiting.setting import Setting
from megatron_hexi.planner.fleet.units import find_units
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.rows import Recorder

LENGTH, HEADS, LONG = 4096, 4, 1e3
#: Two groups on two nodes of which each is a class: units of each.
SHAPES = [((0, 2), (1, 1)), ((0, 1), (1, 3))]
KEY_BYTES = 2 * HEADS * TINY.head_dim * 2
GB_S = 10e9


def lines(shapes, tokens, limits, **job):
    """Groups with from half to all of their tokens, and heads within limits."""
    fleet = find_units(tiny_job(**job), cluster([("a", "PLAIN", 4), ("b", "DOUBLE", 4)]))
    classes = classes_of(sites_of(fleet, True, token_prices(fleet)))
    alone = GroupTimes(fleet.job, classes, shapes, 1, (2, 2), (0.0, LONG), False)
    setting = Setting(fleet.job, classes, False, alone, LONG)
    groups = [
        GroupLines(setting, shape, held / 2, float(held), 2, limit)
        for shape, held, limit in zip(shapes, tokens, limits, strict=True)
    ]
    return setting, groups


@given(
    dealt=st.lists(st.integers(0, HEADS), min_size=2, max_size=2),
    slack=st.lists(st.integers(0, 2), min_size=2, max_size=2),
    part=st.floats(0.5, 1.0),
)
@example(dealt=[3, 1], slack=[0, 0], part=1.0)
@example(dealt=[0, 2], slack=[0, 0], part=1.0)
def test_no_fewer_keys_cross_than_heads_are_elsewhere(dealt, slack, part):
    limits = [
        (
            (max(0, here - more), min(HEADS, here + more)),
            (max(0, HEADS - here - more), min(HEADS, HEADS - here + more)),
        )
        for here, more in zip(dealt, slack, strict=True)
    ]
    setting, groups = lines(SHAPES, [1024, 3072], limits)
    program = Recorder(groups)
    keys = KeyTimes(program, setting, groups, ())
    tokens = [part * 1024, part * 3072]
    values = dict(zip(program.tokens, tokens, strict=True))
    for parts, here in zip(program.parts, dealt, strict=True):
        values |= dict(zip(parts, (here / HEADS, 1 - here / HEADS), strict=True))
    for number, place, of in itertools.product(range(2), range(2), range(2)):
        own, others = ((here, HEADS - here)[place] for here in (dealt[number], dealt[1 - number]))
        crossing = max(0, own - others) / HEADS
        units = SHAPES[number][place][1]
        # Half of the keys are seen at least.
        exact = 0.5 * crossing * tokens[of] * KEY_BYTES / (units * GB_S)
        said = program.least(keys.crossing(number, place, 1 - number, of), values)
        assert said <= exact * (1 + 1e-9) + 1e-15
        if not any(slack) and part == 1.0:
            assert said == pytest.approx(exact)


def test_by_hand():
    # All heads of the one group are on the first node, all of the other on the second: all keys cross.
    limits = [((HEADS, HEADS), (0, 0)), ((0, 0), (HEADS, HEADS))]
    setting, groups = lines(SHAPES, [1024, 3072], limits)
    program = Recorder(groups)
    values = dict(zip(program.tokens, (1024, 3072), strict=True))
    values |= dict(zip(itertools.chain(*program.parts), (1, 0, 0, 1), strict=True))
    keys = KeyTimes(program, setting, groups, [0, 1])
    # The outer group sees all of the inner one's, on two units; the inner one half of the other's, on three.
    assert program.least(keys.crossing(0, 0, 1, 1), values) == pytest.approx(3072 * KEY_BYTES / (2 * GB_S))
    assert program.least(keys.crossing(1, 1, 0, 0), values) == pytest.approx(512 * KEY_BYTES / (3 * GB_S))
    assert program.least(keys.crossing(0, 1, 1, 1), values) == 0


def test_groups_on_one_site_each_send_all_or_nothing():
    setting, groups = lines([((0, 2),), ((1, 2),)], [1024, 3072], [((0, HEADS),), ((0, HEADS),)])
    program = Recorder(groups)
    keys = KeyTimes(program, setting, groups, ())
    [(variable, each)] = keys.crossing(0, 0, 1, 1)
    assert variable == program.tokens[1]
    assert each == pytest.approx(0.5 * KEY_BYTES / (2 * GB_S))
    setting, groups = lines([((0, 2),), ((0, 1),)], [1024, 3072], [((0, HEADS),), ((0, HEADS),)])
    assert KeyTimes(Recorder(groups), setting, groups, ()).crossing(0, 0, 1, 1) == []


def test_queries_that_share_a_kv_head_may_be_on_several_units():
    model = replace(TINY, kv_heads=1)
    limits = [((HEADS, HEADS), (0, 0)), ((1, 1), (HEADS - 1, HEADS - 1))]
    setting, groups = lines(SHAPES, [1024, 3072], limits, model=model)
    program = Recorder(groups)
    # The only KV head is on both nodes.
    assert KeyTimes(program, setting, groups, ()).crossing(0, 0, 1, 1) == []
    assert np.isclose(setting.ratio, 4)
