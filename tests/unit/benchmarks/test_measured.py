"""The measured benchmarks: layouts, what the figures say, and the schedule of a plan on one device."""

import dataclasses
import json
import math

import pytest

from benchmarks import blocks
from benchmarks.measured.launch import Run, RunFailed
from benchmarks.measured.layouts import find_layouts
from benchmarks.measured.measure import _check_losses
from benchmarks.measured.ministages import ministage_layouts
from benchmarks.measured.page import findings, write_page
from benchmarks.measured.results import Measured, ScenarioResult, read_results, results_text
from benchmarks.measured.scenarios import SCENARIOS, words
from megatron_hexi.cluster import read_cluster
from megatron_hexi.cluster.device import Host
from megatron_hexi.plan import write_plan
from megatron_hexi.planner import find_plan
from tests.support.plans import RAGGED, SPARSE, TORN


def measured(name, seconds, uniform=False, predicted=1.0):
    return Measured(name, "text", uniform, 4, predicted, seconds, "" if seconds else "rank 1 died\nits log")


RESULT = ScenarioResult(
    name="a",
    decides="speed",
    seq_length=1000,
    speeds="paced",
    ceiling_tokens_per_s=1100.0,
    attention_share=0.6,
    layouts=[
        measured("plan", [[1.0, 1.02], [0.98, 1.0]], predicted=1.05),
        measured("ring", [[2.0, 2.2], [2.1, 2.1]], uniform=True, predicted=2.0),
        measured("ulysses", [], uniform=True),
        measured("proportion", [[1.5], [1.5]], predicted=1.5),
    ],
    missing={"usp": "too few heads"},
    testbed={},
    versions={"torch": "2.0"},
    date="2026-01-01",
)


def test_figures_of_a_scenario():
    assert RESULT.plan.median_s == 1.0
    assert RESULT.plan.spread == pytest.approx(0.02)
    assert RESULT.plan.error == pytest.approx(0.05)
    assert RESULT.rival is RESULT.layouts[1]
    assert RESULT.speed_up == pytest.approx(2.1)
    # Where no uniform layout runs, the best of the others.
    others = dataclasses.replace(RESULT, layouts=[RESULT.layouts[0], *RESULT.layouts[2:]])
    assert others.rival is RESULT.layouts[3]
    assert others.speed_up == pytest.approx(1.5)
    assert RESULT.of_ceiling == pytest.approx(1000 / 1100)


def test_layouts_with_one_beside_them_are_compared_with_it():
    whole = measured("one stage", [[2.0]], predicted=2.1)
    turns = dataclasses.replace(measured("in turns", [[2.5]], predicted=2.73), beside="one stage")
    lost = dataclasses.replace(measured("lost", []), beside="one stage")
    result = dataclasses.replace(RESULT, layouts=[whole, turns, lost])
    assert findings({"m": result}) == [
        "m: in turns takes 1.25 times as long as one stage, 1.30 predicted",
        "Iteration times of 2 layouts in paced runs are predicted within 9.2%, 7.1% in the median.",
    ]


def test_ministages_are_laid_out_beside_whole_stages():
    (scenario,) = (one for one in SCENARIOS if one.name == "ministages")
    file = read_cluster(scenario.file)
    host = Host(usable_gib=8, bandwidth_gb_s=3, memory_gb_s=8, estimate="chosen")
    ranks = tuple(
        dataclasses.replace(rank, device=dataclasses.replace(rank.device, host=host)) for rank in file.ranks
    )
    layouts = {one.name: one for one in ministage_layouts(scenario, dataclasses.replace(file, ranks=ranks))}
    assert [one.beside for one in layouts.values()] == ["", *["one stage"] * 3, "", *["two stages"] * 3]
    sizes = [replica.stages[-1].ministage_sizes for one in layouts.values() for replica in one.plan.replicas]
    assert sizes == [(8,), *[(1,) * 8] * 3, (4,), *[(1,) * 4] * 3]
    assert 1.1 < layouts["one stage, ministages"].predicted_s / layouts["one stage"].predicted_s < 1.4


def test_results_are_kept_and_written_as_a_page(tmp_path):
    loads = (
        [{"gpu": 1, "measured_s": 0.1}, {"gpu": 0, "measured_s": 0.008}],
        [{"gpu": 0, "measured_s": 0.0095}],
    )
    moments = {when: {"speeds": load} for when, load in zip(("before", "after"), loads, strict=True)}
    quota = dataclasses.replace(
        RESULT, speeds="quota", testbed={"plan": [{"measured": moments}], "ulysses": []}
    )
    results = {"a": RESULT, "a, quota": quota}
    path = tmp_path / "measured.json"
    path.write_text(results_text(results))
    assert read_results(path) == results
    write_page(results, tmp_path)
    page = (tmp_path / "measured.md").read_text()
    assert findings(results)[-1] in page
    assert "- *a* has no layout for usp: too few heads." in page
    assert "failed: rank 1 died |" in page
    assert page.count("varied, 8.0 to 9.5 ms a cycle") == 1
    assert (tmp_path / "measured" / "layouts.png").stat().st_size > 1000
    lines = findings(results)
    assert lines[0] == "a: 2.10 times the tokens/s of the best uniform layout (ring), 90.9% of the ceiling"
    # Only paced runs are predicted: 5 %, 4.8 % and 0 %.
    assert (
        lines[-1]
        == "Iteration times of 3 layouts in paced runs are predicted within 5.0%, 4.8% in the median."
    )


def test_losses_that_differ_are_no_result():
    alike, other = Run((1.0,), (2.0, 1.0), {}), Run((1.0,), (2.0, 1.01), {})
    _check_losses({"plan": [alike], "ring": [alike]})
    with pytest.raises(RunFailed, match="ring: losses"):
        _check_losses({"plan": [alike], "ring": [other]})


@pytest.mark.parametrize(
    "scenario", [one for one in SCENARIOS if one.layouts is None], ids=lambda one: one.name
)
def test_every_scenario_has_a_plan_and_rivals(scenario):
    cluster = read_cluster(scenario.file)
    planned = find_plan(scenario.request, cluster, with_baselines=True)
    layouts, missing = find_layouts(planned, cluster)
    assert layouts[0].name.startswith("plan")
    names = [name for layout in layouts for name in layout.name.split(", ")]
    assert sorted([*names, *missing]) == sorted(["plan", *(one.name for one in planned.baselines)])
    assert all(layout.predicted_s >= layouts[0].predicted_s * (1 - 1e-9) for layout in layouts)
    assert len({layout.gpus for layout in layouts}) > 1, "the fast part alone is among them"
    arguments = words(scenario.arguments(4))
    assert arguments[arguments.index("--seq-length") + 1] == str(scenario.seq_length)


@pytest.mark.parametrize("plan", [TORN, RAGGED, SPARSE], ids=["torn", "ragged", "sparse"])
def test_the_schedule_of_every_rank_runs_on_one_device(plan, tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    found = blocks.main([str(path), "--device", "cpu", "--precision", "fp32", "--repeats", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert found == 0
    with_work = {
        member.number
        for group in plan.replicas[0].domain.groups
        for member in group.members
        if group.tokens and member.heads[0] < member.heads[1]
    }
    assert {rank for row in rows for rank in row["ranks"]} == with_work
    assert all(math.isfinite(row["forward_ratio"]) and row["backward_ratio"] > 0 for row in rows)
