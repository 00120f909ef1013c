"""HexiScale's and Zorse's planners by their authors' rules, on the authors' own inputs."""

import itertools

import numpy as np
import pytest

from benchmarks.rivals import zorse
from benchmarks.rivals.__main__ import PAGE, page
from benchmarks.rivals.cases import hexiscale_cases, zorse_cells, zorse_example, zorse_view
from benchmarks.rivals.plans import hexiscale_plan, zorse_plan
from benchmarks.rivals.readings import PUBLISHED
from benchmarks.rivals.readings.staged import StagedJudge
from megatron_hexi.plan import validate_plan
from megatron_hexi.planner import Request

CASES = {case.name: case for case in hexiscale_cases()}


@pytest.mark.parametrize("name", CASES)
def test_hexiscale_s_formulas_give_the_seconds_that_its_code_prints(name):
    case = CASES[name]
    assert round(case.scheduler.seconds(case.chosen), 3) == case.seconds


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_s_gpus_get_hexiscale_s_stages(name):
    case = CASES[name]
    for chosen in case.chosen:
        gpus = sorted(gpu for unit, _ in chosen for gpu in unit)
        found = case.scheduler.pipeline(gpus)
        assert found is not None
        assert {unit for unit, _ in found} == {unit for unit, _ in chosen}
        assert case.scheduler.with_layers([unit for unit, _ in chosen]) == chosen


def test_hexiscale_s_example_is_chosen():
    case = CASES["its example"]
    found = case.scheduler.choose()
    assert found is not None
    assert found.pipelines == case.chosen
    assert case.training.batch * case.training.sequence / found.seconds == pytest.approx(12269.017, abs=5e-4)


def test_zorse_s_example_is_chosen():
    machines, training, times, told = zorse_example()
    found = zorse.choose(machines, training, times)
    assert found is not None
    assert found[:4] == told[:4]
    assert found.milliseconds == pytest.approx(told.milliseconds, rel=1e-13)


def test_groups_are_zorse_s_least_cuts():
    random = np.random.default_rng(0)
    for _ in range(10):
        count = int(random.integers(2, 6))
        links = random.integers(1, 30, (count, count)).astype(float)
        machine = sorted([*range(count), *random.integers(0, count, 4).tolist()])
        kinds = ["gpu"] * len(machine)
        machines = zorse.Machines(kinds, machine, np.minimum(links, links.T), links, {})
        weights = machines.bandwidth[np.ix_(machine, machine)]
        sides = (
            np.array([False, *side]) for side in itertools.product([False, True], repeat=len(machine) - 1)
        )
        least = min(weights[side][:, ~side].sum() for side in sides if side.any())
        (one, other) = next(groups for groups in zorse.k_cuts(machines) if len(groups) == 2)
        assert weights[np.ix_(one, other)].sum() == least
        sizes = [len(groups) for groups in zorse.k_cuts(machines)]
        assert sizes == list(range(count, 0, -1))


def test_both_planners_choices_are_plans_and_our_readings_are_kinder():
    case = CASES["its example"]
    theirs = hexiscale_plan(
        case.cluster, case.job, case.chosen, case.training.micro // case.training.pipelines
    )
    name, request, cluster = next(zorse_cells())
    choice = zorse.choose(*zorse_view(request, cluster))
    assert choice is not None
    assert name.startswith("zorse-a")
    shared = zorse_plan(cluster, request.job, choice)
    for planner, timed, judge in (
        ("hexiscale", theirs, StagedJudge(Request(case.job), case.cluster)),
        ("zorse", shared, StagedJudge(request, cluster)),
    ):
        validate_plan(timed.plan)
        ours = PUBLISHED[planner](judge)
        assert ours is not None
        assert ours.fits
        assert ours.iteration_s <= timed.iteration_s


@pytest.mark.slow
def test_the_page_is_current():
    assert page() == PAGE.read_text(), "stale; run: python -m benchmarks.rivals --page"
