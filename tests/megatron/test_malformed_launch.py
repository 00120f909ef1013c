"""Every malformed plan in a real job: each rank says the same one line, ends with exit code 2, at once.

Some three seconds a plan, so on request: pytest -m slow tests/megatron/test_malformed_launch.py
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.megatron.launch import environment
from tests.megatron.test_job_mismatch import DATA
from tests.support.mistakes import error_of
from tests.unit.plan.test_malformed_plans import MISTAKES


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_every_rank_says_the_line_and_ends(mistake, tmp_path):
    message, path = error_of(mistake, tmp_path)
    shared = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    start = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "megatron_hexi.pretrain_gpt", *DATA, "--hexi-plan", str(path)],
            cwd=tmp_path,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank, process in enumerate(ranks):
        errors = process.communicate(timeout=250)[1]
        assert process.returncode == 2
        assert "Traceback" not in errors
        assert f"hexi: error: [rank {rank}] {message}\n" in errors
        assert errors.count("hexi: error:") == 1
    print(f"{time.monotonic() - start:.1f} s: {message.replace(str(tmp_path), '')}")
