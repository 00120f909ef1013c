"""The bound by whole groups: the least time of one, and how many of them fit into the units."""

from math import comb

import numpy as np
import pytest

from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.memory import GIB
from megatron_hexi.plan.parts import BUSY_ROWS
from megatron_hexi.planner.bound import LowerBound
from megatron_hexi.planner.bound import bound as bounds
from megatron_hexi.planner.bound.groups.group_times import GroupTimes
from megatron_hexi.planner.bound.groups.site_times import SiteClass, in_steps
from megatron_hexi.planner.bound.packings.nested import Nested
from megatron_hexi.planner.bound.packings.packing import Packing, _Box, packable, shapes_of
from megatron_hexi.planner.bound.packings.placing import placed
from megatron_hexi.planner.bound.packings.program import Program, kinds_of
from megatron_hexi.planner.bound.pieces.gradients import Ring
from megatron_hexi.planner.bound.pieces.load import Load
from megatron_hexi.planner.budget import THOROUGH
from megatron_hexi.planner.fleet.links import best_links
from megatron_hexi.planner.fleet.room import Room
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import Layout, Part
from megatron_hexi.planner.layouts.trial import Judge
from tests.support.bounds import lower_bound
from tests.support.costs import cluster, tiny_job

FEW_HEADS = [("fast", "DOUBLE", 1), ("slow", "PLAIN", 1)]
ANY = [(0.0, 1.0)]
BOTH = [((0, 1), (1, 1))]


def site_classes(fleet):
    """Each site as a class of its own."""
    crosses, classes = len(fleet.sites) > 1, []
    for site in fleet.sites:
        device = fleet.kinds[fleet.units[site[0]].kind].devices[0]
        links = best_links(fleet, site[0], crosses)
        load = Load(fleet.job, device_speeds(device, fleet.job), links, len(site), 0)
        room = Room(fleet.job, 0, device.usable_gib * GIB, len(fleet.units))
        classes.append(SiteClass([site], [load], [[room]]))
    return classes


def best_by_hand(fleet, groups):
    """The least seconds of the layers, over all deals of heads and many of tokens, of one group or two."""
    judge, length, heads = Judge(fleet), fleet.job.seq_length, fleet.job.workload().local_heads
    found = []
    for place in range(1, 64):
        first = length * place // 64
        split = (first, length - first)
        if groups == 1:
            deals = [(few, heads - few) for few in range(heads + 1)]
            layouts = [Layout((Part((0, 1), split, dealt),), 1) for dealt in deals]
        else:
            parts = [Part((unit,), (tokens,), (heads,)) for unit, tokens in enumerate(split)]
            layouts = [Layout(tuple(parts), 1), Layout(tuple(parts[::-1]), 1)]
        found += [judge.try_out(fleet, [layout], 1) for layout in layouts]
    times = [trial.timing.phases for trial in found if trial.fits]
    return min(phases.total - phases.gradients - phases.optimizer for phases in times)


@pytest.mark.parametrize("bandwidth", [1, 10, 1000])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_least_time_of_a_group_is_close_to_that_of_its_best_deal(bandwidth, recompute):
    job = tiny_job(seq_length=2**15, recompute=recompute)
    fleet = find_units(job, cluster(FEW_HEADS, bandwidth=bandwidth))
    best_s = best_by_hand(fleet, 1)
    times = GroupTimes(fleet.job, site_classes(fleet), BOTH, 1, (1, 1), (0.0, best_s))
    least_s = float(times.least(((0, 1), (1, 1)), np.array([float(job.seq_length)]), ANY)[0, 0])
    # What all-to-alls hide at best, they need not hide here.
    assert (0.8 if bandwidth == 1 else 0.93) * best_s <= least_s * job.stage_layers <= best_s


def test_memory_that_heads_and_tokens_share_slows_a_group_down():
    # A fast GPU would take most heads and most tokens; it has no room for both.
    job = tiny_job(seq_length=2**18)
    seconds = []
    for usable in (64, 5):
        fleet = find_units(job, cluster(FEW_HEADS, bandwidth=1000))
        classes = site_classes(fleet)
        room = Room(fleet.job, 0, usable * GIB, len(fleet.units))
        tight = [SiteClass([[0]], classes[0].loads, [[room]]), classes[1]]
        times = GroupTimes(fleet.job, tight, BOTH, 1, (1, 1), (0.0, 100.0))
        seconds.append(float(times.least(((0, 1), (1, 1)), np.array([2.0**18]), ANY)[0, 0]))
    assert seconds[0] * 1.05 < seconds[1] < np.inf


@pytest.mark.parametrize("bandwidth", [2, 10, 1000])
def test_two_groups_wait_for_the_keys_of_their_only_step(bandwidth):
    job = tiny_job(seq_length=2**13, recompute="full")
    fleet = find_units(job, cluster(FEW_HEADS, bandwidth=bandwidth))
    best_s = best_by_hand(fleet, 2)
    bound = lower_bound(fleet, 1, 2 * best_s)
    classes = site_classes(fleet)
    pair = GroupTimes(fleet.job, classes, BOTH, 1, (2, 2), (0.0, best_s))
    many = GroupTimes(fleet.job, classes, BOTH, 1, (2, 3), (0.0, best_s))
    tokens = np.array([0.3, 0.31]) * job.seq_length
    alone = ((1, 1),)
    assert bound.iteration_s <= best_s * 1.05
    # With more groups than two, other steps hide the last keys.
    assert pair.least(alone, tokens, ANY) >= many.least(alone, tokens, ANY)
    if bandwidth == 2:
        assert pair.least(alone, tokens, ANY) > 1.05 * many.least(alone, tokens, ANY)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("compute", [0.3, 1.0, 4.0])
def test_no_split_of_keys_into_steps_is_faster_than_the_formula(steps, compute):
    random, wire = np.random.default_rng(steps), 1.0
    bound = float(in_steps(np.array(wire), np.array(compute), steps))
    ratio = compute / wire
    even = np.array([ratio**step for step in range(steps)])
    splits = [even / even.sum(), *random.dirichlet(np.ones(steps), 300)]
    # A step is computed when its keys are there, after the steps before it.
    seconds = []
    for parts in splits:
        end = 0.0
        for arrived, part in zip(np.cumsum(parts) * wire, parts, strict=True):
            end = max(end, arrived) + compute * part
        seconds.append(end)
    assert min(seconds) == pytest.approx(bound)
    assert seconds[0] == pytest.approx(bound)


def test_all_to_alls_in_halves_need_a_member_with_rows_enough():
    job = tiny_job(seq_length=2**18)
    fleet = find_units(job, cluster([("a", "PLAIN", 4), ("b", "PLAIN", 4)], bandwidth=5))
    classes, shape = site_classes(fleet), ((0, 4), (1, 4))
    either, whole, halves = (
        GroupTimes(job, classes, [shape], 1, (1, 1), (0.0, 10.0), half) for half in (None, False, True)
    )
    # 2 x 33792 rows: more than all four heads of 2^14 tokens have, three heads of 2^15, one of 2^18.
    for tokens, busiest in ((2.0**14, 5), (2.0**15, 3), (2.0**18, 1)):
        assert np.ceil(2 * BUSY_ROWS / tokens) == busiest
        least, as_whole, as_halves = (
            float(times.least(shape, np.array([tokens]), ANY)[0, 0]) for times in (either, whole, halves)
        )
        assert least < as_whole
        assert (as_halves == np.inf) == (busiest > 4)
        assert (as_halves == least) == (busiest == 1)
        assert as_halves >= least


def test_what_stays_inside_a_site_counts():
    # A GPU behind a link that nothing crosses is no help: its group takes what the others take alone.
    nodes = [("a", "H100-SXM-80GB", 4), ("b", "PLAIN", 1)]
    job = tiny_job(seq_length=2**14)
    classes = site_classes(find_units(job, cluster(nodes, bandwidth=0.001)))
    alone, both = ((0, 4),), ((0, 4), (1, 1))
    times = GroupTimes(job, classes, [alone, both], 1, (1, 1), (0.0, 10.0))
    least = [float(times.least(shape, np.array([2.0**14]), ANY)[0, 0]) for shape in (alone, both)]
    # All but the latency of four all-to-alls.
    assert least[1] == pytest.approx(least[0] - 4 * 5e-6, rel=1e-3)


def test_whole_groups_bound_what_pieces_let_pass(monkeypatch):
    # Four heads on two speeds, one group is best: three and one leave the slow GPU idle.
    fleet = find_units(tiny_job(seq_length=2**16), cluster(FEW_HEADS, bandwidth=1))
    with_groups = lower_bound(fleet, 1, 100.0).iteration_s
    monkeypatch.setattr(bounds, "packable", lambda _classes, _most: False)
    pieces_only = lower_bound(fleet, 1, 100.0).iteration_s
    assert pieces_only < with_groups


def test_every_choice_of_units_is_a_shape_once():
    fleet = find_units(tiny_job(), cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 3)]))
    twice = SiteClass([[0, 1], [2, 3]], [], [])
    shapes = list(shapes_of([twice, SiteClass([[4, 5, 6]], [], [])]))
    assert len(shapes) == len(set(shapes)) == comb(4, 2) * 4 - 1
    assert ((0, 2), (0, 1), (1, 3)) in shapes
    assert packable(site_classes(fleet), 12)
    assert not packable(site_classes(fleet), 11)
    assert not packable([SiteClass([range(8)] * 6, [], [])] * 2, THOROUGH.proof.packed)


def test_the_program_packs_by_hand():
    # Three units of one class, two of another; shapes of 2 + 0, 1 + 1 and 0 + 2.
    used = np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    total, shapes = Program(used, [3, 2], (1, 5)).solve(np.array([5.0, 4.0, 1.0]))
    assert total == pytest.approx(5 / 2 + 4 * 2)  # half of the first, two of the second
    assert shapes == pytest.approx({0: 0.5, 1: 2})
    total, shapes = Program(used, [3, 2], (1, 1)).solve(np.array([5.0, 4.0, 1.0]))
    assert total == pytest.approx(5)
    assert shapes == pytest.approx({0: 1})
    # Whole groups: the second twice, as that is packed most; one unit of the first class is left.
    assert Program(used, [3, 2], (1, 5)).whole(np.array([5.0, 4.0, 1.0])) == [1, 1]
    assert Program(used, [5, 2], (1, 5)).whole(np.array([5.0, 4.0, 1.0])) == [1, 1, 0]
    assert Program(used, [5, 2], (1, 1)).whole(np.array([5.0, 4.0, 1.0])) == [0]


def test_of_shapes_with_the_same_units_the_one_that_is_worth_most_is_packed():
    used = np.array([[2.0], [2.0], [1.0], [2.0]])
    program = Program(used, [4], (1, 4))
    for worth, best in (([3.0, 5.0, 1.0, 4.0], 1), ([3.0, 3.0, 0.0, 3.0], 0)):  # of equals, the first one
        total, shapes = program.solve(np.array(worth))
        assert total == pytest.approx(2 * worth[best])
        assert shapes == pytest.approx({best: 2})
    kinds, numbers = kinds_of(used)
    assert (kinds[numbers] == used).all()
    assert len(kinds) == 2


def test_plans_are_told_apart_by_all_numbers_of_groups():
    open_, leaves = [_Box((2, 70), [(2, 70)], None)], []
    while open_:
        box = open_.pop()
        open_ += box.halves()
        leaves += [] if box.halves() else [box]
    counts = [number for box in leaves for number in range(box.span[0], box.span[1] + 1)]
    assert sorted(counts) == list(range(2, 71))
    assert all(Nested.cut(box.span) is None and box.groups == [(2, 70)] for box in leaves)
    assert max(box.span[1] / box.span[0] for box in leaves) < 1.2


def test_units_without_memory_for_tokens_are_packed_for_nothing():
    # Three groups are asked for, and only two units have room for anything. By the linear program alone:
    # where groups are looked at together, it is not counted that a site has no room.
    fleet = find_units(tiny_job(seq_length=2**14), cluster([(name, "PLAIN", 1) for name in "abc"]))
    classes = site_classes(fleet)
    full = SiteClass([[2]], classes[2].loads, [[Room(fleet.job, 0, 0.0, 3)]])
    packing = Packing(fleet.job, [*classes[:2], full], [1], False, Ring(), (1e-3, 1.0), THOROUGH.proof)
    both = Packing(fleet.job, classes[:2], [1], False, Ring(), (1e-3, 1.0), THOROUGH.proof)
    loose = [packed.least_s() for packed in (packing, both)]
    assert loose[0] == pytest.approx(loose[1], rel=0.01)
    close = [packed.closely_least_s(1.0) for packed in (packing, both)]
    assert loose[0] <= close[0] <= close[1] * 1.01


def test_groups_that_hold_most_become_groupings_of_all_units():
    fleet = find_units(tiny_job(seq_length=2**16), cluster([("fast", "DOUBLE", 2), ("slow", "PLAIN", 4)]))
    found = LowerBound(fleet, 1, 100.0, THOROUGH.proof).groupings()
    assert found
    for grouping in found:
        assert len(grouping) > 1
        assert sorted(unit for group in grouping for unit in group) == list(range(6))


def test_shapes_are_placed_where_the_fewest_units_are_left():
    twice, once = SiteClass([[0, 1], [2, 3]], [], []), SiteClass([[4, 5, 6]], [], [])
    # A group on both sites of a class, and one unit of the other class.
    assert placed([twice, once], [((0, 1), (0, 1), (1, 1))]) == ((0, 2, 4), (1, 3, 5, 6))
    # Single units share a site before they begin another.
    assert placed([twice, once], [((0, 1),)] * 3) == ((0,), (1,), (2,), (3, 4, 5, 6))
    # The third shape asks for two units of a site, and there is none that has two left.
    shapes = [((0, 2), (1, 3)), ((0, 1), (1, 1)), ((0, 2),)]
    assert placed([twice, once], shapes) == ((0, 1, 4, 5, 6), (2,), (3,))
