"""Under torchrun a mistake is one line a job, last on the screen, and its exit code can reach the caller."""

from __future__ import annotations

import subprocess

import pytest

from megatron_hexi.plan import write_plan
from tests.megatron.launch import environment, launch
from tests.megatron.test_uneven_training import MODEL, THREE_AND_ONE

#: A length that is not the plan's, on all four ranks.
WRONG = [*MODEL, "--train-iters", "1", "--hexi-plan", "plan.yaml", "--seq-length", "64"]
SAID = "plan.yaml: workload.seq_length is"


@pytest.fixture
def folder(tmp_path):
    write_plan(THREE_AND_ONE, tmp_path / "plan.yaml")
    return tmp_path


def test_torchrun_ends_with_the_line(forks, folder):
    result = launch(folder, ranks=4, args=WRONG, python=forks.python)
    before, _, block = result.stderr.partition("FAILED\n")
    assert before.count("hexi: error: ") == 1
    assert SAID in before
    assert "<NO_OTHER_FAILURES>" in block
    (last, rule) = result.stderr.rstrip().splitlines()[-2:]
    assert SAID in last
    assert set(rule) == {"="}
    assert result.returncode == 1  # torchrun's own, for all failures


def test_our_torchrun_passes_the_exit_code_on_without_a_traceback(forks, folder):
    command = [forks.python, "-m", "megatron_hexi.torchrun", "--standalone", "--nproc-per-node", "4"]
    result = subprocess.run(
        [*command, "-m", "megatron_hexi.pretrain_gpt", *WRONG],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.count("hexi: error: ") == 1
    assert SAID in result.stderr


def test_our_torchrun_reports_what_no_rank_has_said(forks, tmp_path):
    (tmp_path / "fails.py").write_text("import sys; sys.exit(7)\n")
    command = [forks.python, "-m", "megatron_hexi.torchrun", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "fails.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 7
    assert "exitcode  : 7" in result.stderr
