"""Whole groups that wait for each other: no layout whatever is faster than what is said of its groups."""

import numpy as np
import pytest

from megatron_hexi.cost import Job
from megatron_hexi.cost.presets import presets
from megatron_hexi.planner.bound.groups.group_times import GroupTimes
from megatron_hexi.planner.bound.packings.wholly import alike_stages
from megatron_hexi.planner.bound.pieces.gradients import least_ring
from megatron_hexi.planner.bound.pieces.prices import token_prices
from megatron_hexi.planner.bound.site_classes import classes_of, sites_of
from megatron_hexi.planner.bound.waiting.beside import Beside
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.group_program import GroupProgram, Stage
from megatron_hexi.planner.bound.waiting.setting import Rings, Setting
from megatron_hexi.planner.bound.waiting.together import Tries, suffices
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import Layout, Part
from megatron_hexi.planner.layouts.trial import Judge
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import shapes_of_trial, trials_of

MANY = 1_000_000
#: Of three groups, the outermost first.
ORDER = (0, 1, 2)


def layer_s(trial, weights):
    """Seconds of a layer of a trial of one replica, on average of all stages, with the vocabulary."""
    each = [
        sum(one.finish.max() for one in stage.passes) + (stage.logits + stage.logits_sum).max() / stage.layers
        for stage in trial.timing.stages
    ]
    return float(np.array(each) @ weights)


def settings_of(fleet, trial, time):
    """What the groups of a trial have in common in a part of its time; the shape and the tokens of each."""
    classes, shapes = shapes_of_trial(fleet, trial)
    parts = [part for part in trial.layouts[0].parts if part.total]
    halves = trial.plan.exchange.parts > 1
    span, count = (len(parts), len(parts)), trial.layouts[0].micro_batches
    weights = GroupTimes(fleet.job, classes, shapes, count, span, (0.0, 1.0), halves).weights
    longest_s = time * layer_s(trial, weights)
    alone = GroupTimes(fleet.job, classes, shapes, count, span, (0.0, longest_s), halves)
    ring = least_ring(fleet, trial.iteration_s, crosses=True)
    rings = Rings.of(fleet.job, ring, time * trial.iteration_s, count)
    settings = [
        Setting(fleet.job, classes, halves, alone, longest_s, stages, rings)
        for stages in alike_stages(classes)
    ]
    return settings, shapes, np.array([one.total for one in parts])


def is_possible(fleet, trial, part=1.0, room=1.0):
    """Whether a trial's groups may do what they do in a part of its time, with some more tokens each."""
    settings, shapes, tokens = settings_of(fleet, trial, part)
    most = np.minimum(room * tokens, fleet.job.seq_length)
    beside = Beside(settings, shapes, most, len(shapes)).most(range(len(shapes)))
    return beside is not None and suffices(settings, shapes, beside, Tries(MANY))


def check(seeds, steps):
    """How many layouts were held against what is said of their groups."""
    count = 0
    for seed in seeds:
        for fleet, trial, how in trials_of(seed, steps):
            detail = [(part.units, part.tokens, part.heads) for part in trial.layouts[0].parts]
            for room in (1.0, 1.1):
                assert is_possible(fleet, trial, 1 + 1e-6, room), f"{seed}: {room} {detail} {how}"
            count += 1
    return count


@pytest.mark.slow  # a minute and more; of the thorough proof
def test_no_layout_whatever_is_faster():
    assert check(range(60), 12) > 150


@pytest.mark.parametrize(("waited", "may"), [(0.9, False), (0.5, False), (0.0, True)])
def test_gradients_hide_where_all_to_alls_leave_the_wire_free(waited, may):
    # One group of two nodes: three quarters of tokens and heads here, a quarter there. Of what it waits for
    # gradients and weights, some is known to be needed: the time without it is too short.
    job = Job(presets()["gpt-3b"], 2**14, recompute="full")
    nodes = [("a", "H100-SXM-80GB", 4), ("b", "A100-SXM-80GB", 4)]
    fleet = find_units(job, cluster(nodes, bandwidth=10))
    part = Part(tuple(range(8)), (3072,) * 4 + (1024,) * 4, (6,) * 4 + (2,) * 4)
    trial = Judge(fleet).try_out(fleet, [Layout((part,), 8)], 1)
    gradients = trial.timing.phases.gradients
    assert gradients > 0.05 * trial.iteration_s
    [setting], [shape], [tokens] = settings_of(fleet, trial, 1 + 1e-6)
    ring = least_ring(fleet, trial.iteration_s, crosses=True)
    setting.rings = Rings.of(job, ring, trial.iteration_s * (1 + 1e-6) - waited * gradients, 8)
    lines = GroupLines(setting, shape, float(tokens), float(tokens), 1, ((24, 24), (8, 8)))
    assert GroupProgram([Stage(setting, [lines])], ()).suffices() is may


def test_heads_and_tokens_of_a_site_share_its_memory(monkeypatch):
    # One group of all, and time for everything: each of the 8 units has room for an eighth of what there is.
    fleet = find_units(tiny_job(), cluster([("a", "PLAIN", 4), ("b", "DOUBLE", 4)]))
    classes, shape = classes_of(sites_of(fleet, True, token_prices(fleet))), ((0, 4), (1, 4))
    alone = GroupTimes(fleet.job, classes, [shape], 1, (1, 1), (0.0, 1e3), False)
    setting = Setting(fleet.job, classes, False, alone, 1e3)
    length, heads = setting.length, setting.heads
    [a_head] = alone.room_of_a_head(np.array([length]), np.zeros(1))
    for often, may in ((1.001, True), (0.999, False)):
        room = often * (length + heads * float(a_head[0])) / 8
        monkeypatch.setattr(GroupTimes, "rooms", lambda _self, _place, room=room: [room])
        assert suffices([setting], [shape], np.array([length]), Tries(MANY)) == may, often


def of_nodes(nodes, shapes, longest_s, **network):
    """What groups of a cluster's units have in common in a time."""
    fleet = find_units(tiny_job(seq_length=2**14), cluster(nodes, **network))
    classes = classes_of(sites_of(fleet, True, token_prices(fleet)))
    span = (len(shapes), len(shapes))
    alone = GroupTimes(fleet.job, classes, shapes, 1, span, (0.0, longest_s), False)
    return Setting(fleet.job, classes, False, alone, longest_s)


def test_units_of_two_groups_are_on_one_site_only_if_there_is_room_for_both():
    # Four nodes of one GPU: keys of any two groups cross the network.
    alone, pair = ((0, 1),), ((0, 2),)
    setting = of_nodes([(name, "PLAIN", 1) for name in "abcd"], [alone], 1.0)
    assert not setting.may_meet(alone[0], alone[0])
    assert setting.bandwidth(alone[0], alone[0]) == 10e9
    setting = of_nodes([(name, "PLAIN", 3) for name in "ab"], [alone, pair], 1.0)
    assert setting.may_meet(alone[0], pair[0])
    assert not setting.may_meet(pair[0], pair[0])
    assert setting.bandwidth(alone[0], pair[0]) > 10e9
    assert setting.bandwidth(pair[0], pair[0]) == 2 * 10e9


def test_keys_on_their_way_take_memory(monkeypatch):
    # Two groups of four units, and time for everything: of half of the sequence each.
    nodes, shapes = [("a", "PLAIN", 4), ("b", "DOUBLE", 4)], [((0, 4),), ((1, 4),)]
    setting = of_nodes(nodes, shapes, 1e3)
    [taken] = setting.taken
    # The inner group sends all of its keys and gets half of the other's, and the other way round.
    keys = max(taken.sent + taken.received / 2, taken.sent / 2 + taken.received)
    for often, may in ((1.001, True), (0.999, False)):
        room = often * setting.length / 2 * (1 + taken.attended + keys) / 4
        monkeypatch.setattr(GroupTimes, "rooms", lambda _self, _place, room=room: [room])
        tokens = np.full(2, setting.length / 2)
        assert suffices([setting], shapes, tokens, Tries(MANY)) == may, often


@pytest.mark.parametrize(
    ("order", "time", "may"), [((), 0.98, True), (ORDER, 0.9995, False), (ORDER, 1, True)]
)
def test_who_merges_what_follows_from_the_order(order, time, may):
    # Three groups of one unit, keys for nothing: the innermost merges all of its queries in both steps, the
    # outermost gradients of all keys that it gets. Without an order, half of that is known.
    nodes, tokens = [(name, "PLAIN", 1) for name in "abc"], (10_928, 10_920, 10_920)
    fleet = find_units(tiny_job(seq_length=sum(tokens)), cluster(nodes, bandwidth=1e6))
    heads = fleet.job.workload().local_heads
    parts = tuple(Part((unit,), (held,), (heads,)) for unit, held in enumerate(tokens))
    trial = Judge(fleet).try_out(fleet, [Layout(parts, fleet.job.global_batch_size)], 2)
    [setting], shapes, _ = settings_of(fleet, trial, time * (1 + 1e-6))
    lines = [
        GroupLines(setting, shape, held, held, 3, ((heads, heads),))
        for shape, held in zip(shapes, tokens, strict=True)
    ]
    assert GroupProgram([Stage(setting, lines)], order).suffices() is may


@pytest.mark.parametrize(
    ("room", "time", "may"), [(2, 2, True), (1, 2, False), (1, 1, True), (2, 1, True)], ids=str
)
def test_where_memory_is_short_groups_wait_for_each_other(monkeypatch, room, time, may):
    # Three groups of one unit. With one step of the exchange under way they take longer than with two, and
    # where there is room for one only, they need no less than that.
    nodes, tokens = [(name, "PLAIN", 1) for name in "abc"], (10_240, 4096, 2048)
    fleet = find_units(tiny_job(seq_length=sum(tokens)), cluster(nodes, bandwidth=16))
    heads = fleet.job.workload().local_heads
    parts = tuple(Part((unit,), (held,), (heads,)) for unit, held in enumerate(tokens))
    layout = Layout(parts, fleet.job.global_batch_size)
    trials = {window: Judge(fleet).try_out(fleet, [layout], window) for window in (1, 2)}
    assert trials[1].iteration_s > 1.04 * trials[2].iteration_s
    settings, shapes, _ = settings_of(fleet, trials[time], 1 + 1e-6)
    # The outermost group needs most: all keys of the next one are there, half of its own are on their way.
    [taken], (own, other, _) = settings[0].with_window(room).taken, tokens
    needed = own * (1 + taken.attended + taken.sent / 2) + other * taken.received
    monkeypatch.setattr(GroupTimes, "rooms", lambda _self, _place: [needed * 1.001])
    assert suffices(settings, shapes, np.array(tokens, dtype=float), Tries(MANY)) is may
