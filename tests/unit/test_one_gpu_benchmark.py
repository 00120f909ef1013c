"""Training on one GPU beside the cost model: the page has the present predictions of what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import one_gpu
from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.plan import proportional_plan

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RUNS = one_gpu.read_runs(RESULTS / "one-gpu" / "measured.json")


@pytest.mark.parametrize("gpu", RUNS)
def test_the_page_is_current(gpu: str):
    page = (RESULTS / "one-gpu.md").read_text()
    assert one_gpu.table(RUNS[gpu], one_gpu.machine_of(gpu)) in page
    if gpu.startswith("H200"):
        assert one_gpu.table(RUNS[gpu], read_cluster(RESULTS / "one-gpu" / "h200.yaml")) in page


def test_long_sequences_take_what_is_predicted():
    for gpu, trained in RUNS.items():
        for one in trained:
            job = one_gpu.job_of(one.cell)
            plan = proportional_plan(job.workload(), [[[1]]])
            cost = CostModel(job, one_gpu.machine_of(gpu)).estimate(plan)
            bound = 0.1 if one.cell.tokens >= 16384 else 0.3
            assert cost.iteration_s == pytest.approx(one.seconds, rel=bound)


def test_a_training_that_fails_leaves_what_was_measured(monkeypatch, tmp_path, capsys):
    def train(cell, folder):
        if cell.tokens > 4096:
            raise one_gpu.TrainingFailed("out of memory")
        return one_gpu.Trained(cell, 0.2, 2**34)

    monkeypatch.setattr(one_gpu, "train", train)
    monkeypatch.setattr(one_gpu, "_versions", lambda: {"device": "none"})
    found = tmp_path / "found.json"
    assert one_gpu.main(["--only", "0", "1", "-o", str(found)]) == 0
    out, err = capsys.readouterr()
    assert "failed: out of memory" in err
    assert "| 0.200 |" in out
    assert one_gpu.read_runs(found) == {"H100-SXM-80GB": [one_gpu.Trained(one_gpu.CELLS[0], 0.2, 2**34)]}
    assert one_gpu.main(["--results", str(found)]) == 0
    assert capsys.readouterr().out == out
