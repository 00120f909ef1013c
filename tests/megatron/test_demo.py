"""The demo, with few iterations and its processes forked; on request as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hexi.plan import read_plan
from megatron_hexi.record import read_record
from tests.megatron.forked import Forks
from tests.megatron.launch import REPOSITORY

ITERATIONS = 3


def demo(*args: str | Path, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [str(python), "scripts/quickstart/demo.py", *map(str, args)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("start", ["forked", pytest.param("as-it-is", marks=pytest.mark.slow)])
def test_the_uneven_training_is_that_of_one_rank(start: str, forks: Forks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    python = forks.python if start == "forked" else sys.executable
    result = demo("--iterations", str(ITERATIONS), "--out", folder, python=python)
    assert result.returncode == 0, result.stdout + result.stderr

    found = json.loads((folder / "results.json").read_text())
    assert found["problems"] == []
    assert found["loss_difference"] < found["loss_limit"] == 1e-5
    assert found["stages_difference"] < 1e-5
    assert len(found["losses_stages"]) == ITERATIONS
    assert len(found["losses_alone"]) == len(found["losses_uneven"]) == ITERATIONS
    assert found["losses_uneven"][-1] < found["losses_uneven"][0] - 0.5
    assert all(0 < seconds < found["cpu_seconds_alone"] for seconds in found["cpu_seconds"])

    members = read_plan(folder / "plan.yaml").replicas[0].domain.members
    assert len({member.tokens for member in members}) > 1
    rows = [line for line in result.stdout.splitlines() if "group-" in line]
    assert [row.split("│")[3].strip() for row in rows] == [str(member.tokens) for member in members]

    picture = folder / "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in result.stdout

    assert sum(len(leg.intervals) for leg in read_record(folder / "record.jsonl").legs) == ITERATIONS
    assert f"report {folder / 'plan.yaml'} --record {folder / 'record.jsonl'} -o" in result.stdout


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    result = demo("--out", tmp_path)
    assert result.returncode == 2
    assert "holds files that are not the demo's" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
