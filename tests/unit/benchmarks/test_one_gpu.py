"""The benchmark of one GPU: its page, its parts, and all of it with tiny sizes on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.one_gpu import mps, page
from benchmarks.one_gpu.__main__ import PARTS, main
from benchmarks.one_gpu.cells import job_of, trained
from benchmarks.one_gpu.parts import Part, Setting, run_parts
from benchmarks.one_gpu.profiled import overlap
from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.plan import proportional_plan
from tests.megatron.forked import Forks

RESULTS = Path(__file__).parents[3] / "docs" / "results"
RUNS = page.read_runs(RESULTS / "one-gpu" / "measured.json")


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_the_page_is_current(number: int):
    text, run = (RESULTS / "one-gpu.md").read_text(), RUNS[number]
    for table in page.tables(run).split("\n\n"):
        assert table in text
    if run["gpu"].startswith("H200"):
        rows = trained(run["parts"]["training"]["rows"])
        assert page.training_table(rows, read_cluster(RESULTS / "one-gpu" / "h200.yaml")) in text


def test_long_sequences_take_what_is_predicted():
    for run in RUNS:
        for one in trained(run["parts"]["training"]["rows"]):
            job = job_of(one.cell)
            plan = proportional_plan(job.workload(), [[[1]]])
            cost = CostModel(job, page.machine_of(run["gpu"])).estimate(plan)
            bound = 0.11 if one.cell.tokens >= 16384 else 0.14
            assert cost.iteration_s == pytest.approx(one.seconds, rel=bound)


def test_a_part_that_fails_leaves_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def fails(setting, deadline):
        yield {"first": 1}
        raise RuntimeError("out of memory")

    def runs(setting, deadline):
        assert 0 < deadline.left_s <= 5
        yield {"second": 2}

    output = tmp_path / "out.json"
    parts = [Part("one", "fails", 5, fails), Part("two", "runs", 5, runs)]
    run = run_parts(parts, Setting("H100-SXM-80GB", tmp_path), output)
    assert run["parts"]["one"]["rows"] == [{"first": 1}]
    assert run["parts"]["one"]["failed"] == "RuntimeError: out of memory"
    assert run["parts"]["two"]["rows"] == [{"second": 2}]
    assert json.loads(output.read_text()) == [run]
    assert "one: failed: RuntimeError: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["training"], id="training"),
        pytest.param([part.name for part in PARTS], id="all", marks=pytest.mark.slow),
    ],
)
def test_parts_run_with_tiny_sizes_on_the_cpu(
    parts: list[str], forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", str(forks.python))
    output = tmp_path / "out.json"
    assert main(["--dry-run", "--parts", *parts, "-o", str(output), "--logs", str(tmp_path / "logs")]) == 0
    (run,) = page.read_runs(output)
    assert sorted(run["parts"]) == sorted(parts)
    for name, part in run["parts"].items():
        assert part["rows"], name
        assert not any(row.get("failed") for row in part["rows"]), name
    if "mixed" in parts:
        mixed = [row["layout"] for row in run["parts"]["mixed"]["rows"] if "layout" in row]
        assert mixed[0].startswith("plan")
        assert len(mixed) > 1
    assert {row["cell"]["side"] for row in run["parts"]["training"]["rows"]} == {"stock", "plan"}


def test_shares_are_of_the_whole_gpu():
    parts = [share["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for share in mps.shares({}, (3, 2, 1))]
    assert parts == ["50", "33", "17"]


def test_without_the_service_it_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mps, "_CONTROL", "no-such-command")
    with pytest.raises(mps.NoMpsError, match="no-such-command is not installed"), mps.service():
        pass


def test_messages_are_hidden_while_other_kernels_run():
    spans = [
        ("message", 7, 0.0, 4.0),
        ("attention", 1, 1.0, 2.0),
        ("other", 2, 1.5, 3.0),
        ("message", 8, 3.5, 6.0),
    ]
    assert overlap(spans) == {"message_ms": 6.0, "hidden_ms": 2.0}
