"""Seconds of each step from the loss of a rank, or of a node, to the end of the next iteration."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.megatron.elastic import ElasticJob
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_elastic import more_lines, words
from tests.megatron.test_uneven_training import one_domain

THREE = one_domain((43, (0, 2)), (42, (2, 4)), (42, (4, 6)))
NODES = dict.fromkeys(("n0", "n1", "n2"), 1.0)
KILLS = 5
#: The ends of later steps, each by the first line of a log that shows it.
LINES = {"planned": r"elastic: round \d+:", "loaded": "begins with sample", "next iteration": "has finished"}
#: Said by a round that ends in order for a node.
TAKEN_IN = "starts again with a node that has come"


def steps_after(job: ElasticJob, survivor: str, kill: float) -> dict[str, float]:
    """The seconds from a kill to the end of each step; the loss has just happened."""
    ends: dict[str, float] = {}
    before = job.rank(survivor)

    def wait(step: str, until: Callable[[], bool]) -> None:
        while not until():
            assert time.time() - kill < 240, (step, job.said()[-4000:])
            time.sleep(0.02)
        ends[step] = time.time() - kill

    wait("others end", partial(has_ended, before))
    wait("ranks start", lambda: (rank := job.rank_or_none(survivor)) is not None and rank != before)
    seen = {step: len(job.told(line)) for step, line in LINES.items()}
    for step, line in LINES.items():
        wait(step, partial(told_more, job, line, seen[step]))
    return ends


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def told_more(job: ElasticJob, line: str, than: int) -> bool:
    return len(job.told(line)) > than


def copied_after(job: ElasticJob, iteration: int) -> bool:
    return job.safe_copy() > iteration


def wait_for_save(folder: Path) -> None:
    """Wait until ranks have begun to write a checkpoint, and not ended."""
    begun = time.monotonic()
    while not list(folder.glob("checkpoints/.hexi-round-*/iter_*")):
        assert time.monotonic() - begun < 60
        time.sleep(0.002)


def wait_for_forks(job: ElasticJob, before: set[psutil.Process]) -> float:
    """Wait until the ranks of all nodes are those of another round; says how long it took, in seconds."""
    return job.wait(lambda: not {None, *before} & {job.rank_or_none(name) for name in NODES})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["rank", "node", "save", "swap"])
def test_seconds_of_each_step_of_a_restart(tmp_path: Path, kind: str) -> None:
    """`save`: a rank is killed while a checkpoint is written; `swap`: while a round takes a node in."""
    args = words(tmp_path, THREE, NODES, 100_000, 4 if kind == "save" else 1000)
    launcher = ("--copy-interval", "2", "--script", str(REPOSITORY / "tests/megatron/paced.py"))
    rows: list[dict[str, float]] = []
    with ElasticJob(tmp_path, "1:3", args, launcher=launcher) as job:
        job.start(*NODES)
        for _ in range(KILLS):
            job.wait(partial(copied_after, job, job.safe_copy() + 4))
            time.sleep(3)  # plans for each loss are ready
            if kind == "swap":
                job.kill("n1")
                job.wait(lambda: "2 ranks" in job.rounds()[-1])
                job.wait(partial(more_lines, job, job.lines() + 2))
                before, ends = {job.rank("n0"), job.rank("n2")}, len(job.told(TAKEN_IN))
                job.start("n1")
                job.wait(partial(told_more, job, TAKEN_IN, ends))
                assert wait_for_forks(job, before) < 3  # it has imported Megatron before
            if kind == "save":
                wait_for_save(tmp_path)
            struck = "n2" if kind == "swap" else "n1"
            kill = time.time()
            if kind == "node":
                job.kill(struck)
            else:
                os.kill(job.rank(struck).pid, signal.SIGKILL)
            rows.append(steps_after(job, "n0", kill))
            print(*(f"{step} {s:.2f}" for step, s in rows[-1].items()), f"load {os.getloadavg()[0]:.1f}")
            job.wait(partial(more_lines, job, job.lines() + 2))
            if kind == "node":
                job.start(struck)
            job.wait(lambda: "3 ranks" in job.rounds()[-1])
    for step in rows[0]:
        seconds = [row[step] for row in rows]
        print(f"{kind}: {step}: median {statistics.median(seconds):.1f} s, worst {max(seconds):.1f} s")
