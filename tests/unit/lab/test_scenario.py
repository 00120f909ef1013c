"""Scenarios: worked by hand where that can be done, held against each other where not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron_hexi.cluster import cluster_from_yaml
from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.lab.scenario import course as courses_of_jobs
from megatron_hexi.lab.scenario import play_scenario, read_scenario
from megatron_hexi.lab.scenario.candidate_plans import Plans
from megatron_hexi.lab.scenario.events import find_periods
from megatron_hexi.lab.scenario.scenario_picture import draw_scenario
from megatron_hexi.lab.scenario.scenario_report import scenario_report, spell_duration
from megatron_hexi.plan import proportional_plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.replan.planning.advisor import WINDOW
from megatron_hexi.report.pictures import save_picture
from megatron_hexi.yaml_file import yaml_from_text
from tests.support.costs import cluster, tiny_job

TWO = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)])
JOB = tiny_job(global_batch_size=4)
PLAN = proportional_plan(JOB.workload(), [[[1.0, 1.0], [1.0, 1.0]]])
#: Most is fixed, so that planning is quick.
FIXED = frozenset({"tensor_parallel", "pipeline_parallel", "data_parallel", "micro_batch_size", "recompute"})
REQUEST = Request(JOB, FIXED)
LOST = """\
lasts: 40s
lost: [{nodes: b-0, at: 10s, until: 20s}]
recovery: {checkpoint_every: 7, restart: 5s}
"""


@pytest.fixture
def play(tmp_path):
    """A scenario from its text, played; the policies by name."""

    def played(text, plan=PLAN, job=JOB, machines=TWO, request=REQUEST):
        path = tmp_path / "scenario.yaml"
        path.write_text(text)
        scenario, events = read_scenario(path, machines)
        found = play_scenario(scenario, events, plan, job, request, machines)
        return found, {course.policy: course for course in found.courses}

    return played


def seconds(machines=TWO, plan=PLAN, job=JOB):
    return estimate(plan, job, machines).iteration_s


def test_without_events_all_policies_do_the_same(play):
    planned = find_plan(REQUEST, TWO)
    found, courses = play("lasts: 60s", planned.plan, planned.job)
    for course in courses.values():
        assert course.iterations == pytest.approx(60 / planned.cost.iteration_s, rel=1e-12)
        assert (course.lost_iterations, course.stopped_s, course.restarts, course.swaps) == (0, 0, 0, 0)
        assert found.goodput(course) == pytest.approx(planned.cost.tokens_per_s, rel=1e-12)


def test_a_static_plan_throttled_to_half_for_half_of_the_time(play):
    """By hand: where nothing but curves takes time, half the speed for half of the time leaves 3/4."""
    alone = cluster([("a", "PLAIN", 1)])
    device = replace(alone.ranks[0].device, memory_gb_s=1e12)
    alone = replace(
        alone,
        nodes=(replace(alone.nodes[0], device=device),),
        ranks=(replace(alone.ranks[0], device=device),),
    )
    plan = proportional_plan(JOB.workload(), [[[1.0]]])
    text = "{lasts: 80s, throttled: [{gpus: a-0/0, speed_factor: 0.5, at: 20s, until: 60s}]}"
    found, courses = play(text, plan, JOB, alone)
    for course in courses.values():  # no other plan is any better on one GPU
        assert found.goodput(course) == pytest.approx(0.75 * found.undisturbed_tokens_per_s, rel=1e-6)
    whole = estimate(plan, JOB, alone).iteration_s
    assert courses["static"].iterations == pytest.approx(60 / whole, rel=1e-6)


def test_a_static_plan_keeps_its_pace_by_the_cost_model(play):
    slow = TWO.at_speeds({3: 0.5})
    _, courses = play("{lasts: 40s, throttled: [{gpus: b-0/1, speed_factor: 0.5, at: 10s, until: 30s}]}")
    assert courses["static"].iterations == pytest.approx(20 / seconds() + 20 / seconds(slow), rel=1e-9)


def test_factors_multiply_and_names_reach_whole_nodes_and_kinds(play):
    text = "{lasts: 10s, throttled: [{gpus: b, speed_factor: 0.5}, {gpus: PLAIN, speed_factor: 0.8}]}"
    slow = TWO.at_speeds({0: 0.8, 1: 0.8, 2: 0.4, 3: 0.4})
    _, courses = play(text)
    assert courses["static"].iterations == pytest.approx(10 / seconds(slow), rel=1e-9)


def test_units_of_several_gpus_are_as_fast_as_their_slowest(play):
    job = tiny_job(global_batch_size=4, tensor_parallel=2)
    plan = proportional_plan(job.workload(), [[[1.0], [1.0]]])
    for gpu in (2, 3):
        slowed = f"{{lasts: 10s, throttled: [{{gpus: b-0/{gpu - 2}, speed_factor: 0.5}}]}}"
        _, courses = play(slowed, plan, job)
        slow = TWO.at_speeds({2: 0.5, 3: 0.5})
        assert courses["static"].iterations == pytest.approx(10 / seconds(slow, plan, job), rel=1e-9)


def test_a_lost_node_stops_a_static_plan_until_it_is_back_and_restarted(play):
    each = seconds()
    _, courses = play(LOST)
    static = courses["static"]
    kept = 10 / each // 7 * 7
    assert static.iterations == pytest.approx(kept + 15 / each, rel=1e-9)
    assert static.lost_iterations == pytest.approx(10 / each - kept, abs=1e-6)
    assert (static.stopped_s, static.restarts) == (15, 1)


def test_re_planning_goes_on_with_the_nodes_that_are_left(play):
    planned = find_plan(REQUEST, TWO)
    each, left = planned.cost.iteration_s, find_plan(REQUEST, TWO.without({1})).cost.iteration_s
    _, courses = play(LOST, planned.plan, planned.job)
    course = courses["re-planning"]
    kept = 10 / each // 7 * 7
    between = 5 / left // 1  # stopped with a checkpoint, what is under way is lost
    assert course.iterations == pytest.approx(kept + between + 15 / each, abs=1e-6)
    assert (course.stopped_s, course.restarts) == (10, 2)
    oracle = courses["oracle"]
    assert oracle.iterations == pytest.approx(30 / each + 10 / left, rel=1e-9)


def test_without_any_node_nothing_is_trained(play):
    text = "{lasts: 20s, lost: [{nodes: a, at: 10s}, {nodes: b, at: 10s}], recovery: {checkpoint_every: 1}}"
    _, courses = play(text)
    for course in courses.values():
        assert course.stopped_s == 10
        assert course.pieces[-1].tokens_per_s == 0


def test_a_loss_in_a_restart_starts_it_anew(play):
    lost = "lost: [{nodes: b-0, at: 10s, until: 12s}, {nodes: b-0, at: 14s, until: 15s}]"
    _, courses = play(f"{{lasts: 30s, {lost}, recovery: {{restart: 5s}}}}")
    assert courses["static"].stopped_s == pytest.approx(10)
    assert courses["static"].restarts == 2


#: Work that can be moved: long attention, and links that hardly matter.
LONG = tiny_job(global_batch_size=1, seq_length=65536)
WIDE = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], bandwidth=1000)
MOVABLE = (proportional_plan(LONG.workload(), [[[1.0, 1.0], [1.0, 1.0]]]), LONG, WIDE, Request(LONG, FIXED))
HALVED = (
    "{lasts: 90s, throttled: [{gpus: b-0/1, speed_factor: 0.5, at: 30s, until: 60s}], "
    "replanning: {swap: 10s}}"
)


def test_the_advisor_follows_a_throttle_and_its_end(play):
    found, courses = play(HALVED.replace("10s", "0s"), *MOVABLE)
    paces = {course.policy: found.goodput(course) for course in courses.values()}
    assert 1.05 * paces["static"] < paces["re-planning"] <= paces["oracle"]
    course = courses["re-planning"]
    slow = seconds(WIDE.at_speeds({3: 0.5}), *MOVABLE[:2])
    first, second = (piece for piece in course.pieces if 30 <= piece.begin_s < 60)
    # The swap needs a window that agrees, an interval's end, and the reaction.
    assert (WINDOW - 1) * slow < first.end_s - first.begin_s < 30 * slow
    assert second.tokens_per_s > 1.05 * first.tokens_per_s
    # And back.
    assert course.pieces[-1].tokens_per_s == pytest.approx(found.undisturbed_tokens_per_s, rel=0.03)
    assert course.swaps >= 2


def test_what_is_passed_over_is_what_would_have_been_advised(play, monkeypatch):
    """More of the same cannot change the advice: asked about every iteration, it comes to the same."""
    text = HALVED.replace("10s", "0.01s")
    _, soon = play(text, *MOVABLE)
    monkeypatch.setattr(courses_of_jobs, "KEPT", 10**9)
    _, late = play(text, *MOVABLE)
    assert soon["re-planning"].swaps == late["re-planning"].swaps > 0
    assert soon["re-planning"].iterations == pytest.approx(late["re-planning"].iterations, rel=1e-9)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_nothing_is_faster_than_the_oracle(play, seed):
    text = f"""
lasts: 10m
random:
  seed: {seed}
  throttles: {{mean_time_between: 12m, lasts: 40s, speed_factor: 0.5}}
  congestion: {{mean_time_between: 6m, lasts: 1m, bandwidth_factor: 0.1}}
  failures: {{mean_time_between: 8m, repair: 1m}}
recovery: {{restart: 10s}}
"""
    found, courses = play(text, *MOVABLE)
    assert {event.what for event in found.events} == {"throttled", "congested", "lost"}
    best = courses["oracle"].pieces
    for name in ("static", "re-planning"):
        for piece in courses[name].pieces:
            for one in best:
                if min(one.end_s, piece.end_s) - max(one.begin_s, piece.begin_s) > 1e-9:
                    assert piece.tokens_per_s <= one.tokens_per_s * (1 + 1e-9)
    for course in courses.values():
        ends = [0.0, *(piece.end_s for piece in course.pieces)]
        assert [piece.begin_s for piece in course.pieces] == ends[:-1]
        assert ends[-1] == 600
        trained = sum((p.end_s - p.begin_s) * p.tokens_per_s for p in course.pieces) / found.tokens
        assert trained == pytest.approx(course.iterations + course.lost_iterations, rel=1e-9)


def test_events_are_drawn_each_by_itself(tmp_path):
    def drawn(text):
        path = tmp_path / "drawn.yaml"
        path.write_text(text)
        return read_scenario(path, TWO)[1]

    failures = "failures: {mean_time_between: 6h, repair: 30m}"
    both = drawn(
        f"{{lasts: 30d, random: {{{failures}, "
        "throttles: {mean_time_between: 1d, lasts: 1h, speed_factor: 0.5}}}"
    )
    lost = drawn(f"{{lasts: 30d, random: {{{failures}}}}}")
    assert [event for event in both if event.what == "lost"] == list(lost)
    assert drawn(f"{{lasts: 30d, random: {{{failures}, seed: 5}}}}") != lost
    # 30 days over 6.5 hours, of two nodes, within four standard deviations
    expected = 2 * 30 * 24 / 6.5
    assert abs(len(lost) - expected) < 4 * expected**0.5
    for name in ("a-0", "b-0"):
        own = [event for event in lost if event.name == name]
        assert all(later.begin_s > before.end_s for before, later in itertools.pairwise(own))


def test_periods_cover_the_time_and_alike_ones_are_one(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(
        "{lasts: 10s, throttled: [{gpus: a-0/0, speed_factor: 0.5, at: 2s, until: 4s}, "
        "{gpus: a-0/0, speed_factor: 0.5, at: 4s, until: 6s}, "
        "{gpus: a-0/0, speed_factor: 1.0, at: 1s, until: 8s}]}"
    )
    scenario, events = read_scenario(path, TWO)
    periods = find_periods(events, scenario.lasts)
    assert [(one.begin_s, one.end_s, one.conditions.speeds) for one in periods] == [
        (0, 2, ()),
        (2, 6, ((0, 0.5),)),
        (6, 10, ()),
    ]


LEVELS = "levels:\n- {name: rack, groups: [[a], [b, c]], bandwidth_gb_s: 5}\n"
THREE = [("a", "PLAIN", 2), ("b", "PLAIN", 2), ("c", "DOUBLE", 1)]
MATRIX = """
name: measured
nodes:
- {name: a, gpu: H100-SXM-80GB, gpus: 2}
- {name: b, gpu: A100-SXM-80GB, gpus: 1}
- {name: c, gpu: A100-SXM-80GB, gpus: 1}
matrix:
  nodes: [a-0, b-0, c-0]
  bandwidth_gb_s: [[0, 20, 10], [20, 0, 5], [10, 5, 0]]
  latency_us: [[0, 5, 6], [5, 0, 7], [6, 7, 0]]
"""
CLUSTERS = {
    "a card a GPU": cluster(THREE),
    "a card a node": cluster(THREE, per="node"),
    "racks": cluster(THREE, per="node", extra=LEVELS),
    "measured": cluster_from_yaml(yaml_from_text(Path("measured.yaml"), MATRIX)),
}


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("factors", [{(1, 1): 0.1}, {(0, 0): 0.5, (1, 0): 0.2}, {(2, 1): 0.25}])
@pytest.mark.parametrize("lost", [(), (0,), (2,)])
def test_narrow_links_and_lost_nodes_are_the_same_for_routes_and_for_the_cost_model(name, factors, lost):
    machines = CLUSTERS[name]
    changed = machines.at_bandwidths(factors)
    left = changed.without(lost)
    there = [rank.rank for rank in machines.ranks if rank.node not in lost]
    assert [left.rank_name(rank) for rank in range(len(there))] == [
        machines.rank_name(rank) for rank in there
    ]
    table, size = LinkTable(left), 1e9
    for new, old in enumerate(there):
        for other, far in enumerate(there):
            if new == other:
                continue
            assert left.bandwidth(new, other) == pytest.approx(changed.bandwidth(old, far))
            assert left.route(new, other).latency_s == pytest.approx(machines.route(old, far).latency_s)
            found = table.message_seconds(np.array([new]), np.array([other]), np.array([size]))
            expected = size / changed.bandwidth(old, far) + machines.route(old, far).latency_s
            assert found[0] == pytest.approx(expected)


def test_bandwidths_are_scaled_where_they_were_asked_to_be():
    narrow = CLUSTERS["racks"].at_bandwidths({(1, 1): 0.1, (2, 0): 0.5})
    assert narrow.bandwidth(0, 1) == 100e9
    assert narrow.bandwidth(0, 2) == 1e9  # b-0's card
    assert narrow.bandwidth(0, 4) == 2.5e9  # out of the first rack
    measured = CLUSTERS["measured"].at_bandwidths({(1, 1): 0.1})
    assert measured.bandwidth(0, 2) == pytest.approx(2e9)
    assert measured.bandwidth(0, 3) == pytest.approx(10e9)


def test_a_plan_for_the_nodes_left_names_gpus_of_the_whole_cluster():
    plans = Plans(PLAN, JOB, REQUEST, TWO)
    left = plans.after_loss(frozenset({0}))
    assert left is not None
    assert left.nodes == {1}
    assert set(left.plan.gpus or ()) <= {2, 3}
    assert plans.after_loss(frozenset({0, 1})) is None
    expected = CostModel(left.job, TWO.without({0})).estimate(replace(left.plan, gpus=None)).iteration_s
    assert plans.pace(left, find_periods((), 1.0)[0].conditions).seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0.2s"), (59, "59s"), (90, "1m30s"), (3600, "1h"), (5400, "1h30m"), (86400, "1d"), (604800, "7d")],
)
def test_durations_are_spelled_as_they_are_written(seconds, text):
    assert spell_duration(seconds) == text


@pytest.mark.parametrize("text", ["lasts: 60s", "{lasts: 60s, lost: [{nodes: b, at: 1s}]}"])
def test_pictures_and_tables_of_little(play, tmp_path, text):
    found, _ = play(text)
    save_picture(draw_scenario(found), tmp_path / "scenario.png")
    assert (tmp_path / "scenario.png").stat().st_size > 10_000
    console = Console(width=200)
    with console.capture() as capture:
        console.print(scenario_report(found))
    for word in (
        "static",
        "re-planning",
        "oracle",
        "undisturbed: ",
        *(["b lost from 1s to 1m"] * bool(found.events)),
    ):
        assert word in capture.get()
