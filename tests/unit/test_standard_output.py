"""A standard output that is closed, full or gone is one line of error, whatever was to be printed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from megatron_hexi.plan import Workload, proportional_plan, write_plan
from tests.megatron.launch import environment
from tests.support.shell import is_one_error_line

SHOW, JSON, HELP = "show plan.yaml", "show plan.yaml --json", "--help"
FULL = "cannot be written (No space left on device)"


@pytest.fixture
def shell(tmp_path):
    """Runs ``hexi WORDS`` with redirections, in an interpreter that makes its own streams."""
    write_plan(proportional_plan(Workload(8, 2, 2, 8), [[[1.0]]]), tmp_path / "plan.yaml")
    hexi = f"{shlex.quote(sys.executable)} -m megatron_hexi.cli.main"

    def run(words, redirections, **variables):
        return subprocess.run(
            ["bash", "-c", f"{hexi} {words} {redirections}; exit ${{PIPESTATUS[0]}}"],
            cwd=tmp_path,
            env=environment() | variables,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("words", "redirections", "said"),
    [
        (SHOW, ">&-", "standard output is closed"),
        (SHOW, "| true", "cannot be written (Broken pipe)"),
        (JSON, "> /dev/full", FULL),
        pytest.param(SHOW, "> /dev/full", FULL, marks=pytest.mark.slow),
        pytest.param(HELP, "> /dev/full", FULL, marks=pytest.mark.slow),
        ("show absent.yaml --json", "> /dev/full", "absent.yaml: cannot be read"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_what_cannot_be_printed_is_one_line(shell, words, redirections, said, unbuffered):
    done = shell(words, redirections, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert is_one_error_line(done.stderr), done.stderr
    assert said in done.stderr


def test_what_is_said_besides_is_not_printed_in_the_document(shell):
    assert json.loads(shell("show absent.yaml --json", "2>&-").stdout)["exit_code"] == 2
    assert shell("show absent.yaml", "2> /dev/full").returncode == 2
