"""Kills and stops of a training rank at random moments, on request: who is left names who is gone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_hexi.lab.testbed.job import free_port
from megatron_hexi.plan import write_plan
from tests.megatron.launch import environment
from tests.megatron.test_uneven_training import MODEL, THREE_AND_ONE

RANKS = 4
#: Megatron's time-out is given in whole minutes.
TIMEOUT_S = 60
#: Seconds until who is gone must be named: after a kill, and after the time-out.
KILLED_S, STOPPED_S = 5, TIMEOUT_S + 10
#: Kills need seconds, stops the time-out: more of the former.
GRIEFS = [
    *((launcher, signal.SIGKILL, who, number) for launcher in ("bare", "torchrun") for who, number in
      ((0, 0), (1, 1), (2, 2), (3, 3), (2, 4), (1, 5), (0, 6))),
    *((launcher, signal.SIGSTOP, who, 0) for launcher in ("bare", "torchrun") for who in (0, 2, 3)),
]  # fmt: skip


class Training:
    """Ranks that train without an end, with a log each.

    Args:
        folder: the working directory.
        launcher: ``bare``, each started by itself, or ``torchrun``.
    """

    def __init__(self, folder: Path, launcher: str) -> None:
        self._folder = folder
        write_plan(THREE_AND_ONE, folder / "plan.yaml")
        words = [*MODEL, "--train-iters", "1000000", "--hexi-plan", "plan.yaml", "--log-interval", "20"]
        words += ["--distributed-timeout-minutes", str(TIMEOUT_S // 60)]
        module = ["-m", "megatron_hexi.pretrain_gpt", *words]
        if launcher == "torchrun":
            options = ["--standalone", "--nproc-per-node", str(RANKS), "--redirects", "3", "--log-dir", "log"]
            self._started = [self._start(["-m", "torch.distributed.run", *options, *module], {}, "launcher")]
        else:
            shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            self._started = [
                self._start(module, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, f"rank-{rank}")
                for rank in range(RANKS)
            ]

    def _start(self, words: list[str], variables: dict[str, str], name: str) -> subprocess.Popen:
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=self._folder,
                env=environment() | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, rank: int) -> str:
        own = self._folder / f"rank-{rank}.log"
        if own.exists():
            return own.read_text()
        return "".join(path.read_text() for path in self._folder.glob(f"log/*/attempt_0/{rank}/std*.log"))

    def wait_for_iterations(self) -> None:
        deadline = time.monotonic() + 150
        while "iteration       20" not in self.log(RANKS - 1):
            assert time.monotonic() < deadline, self.log(RANKS - 1)[-3000:]
            time.sleep(0.2)

    def ranks(self) -> dict[int, psutil.Process]:
        processes = [psutil.Process(started.pid) for started in self._started]
        if len(processes) == 1:
            processes = processes[0].children()
        ranks = ((process.environ().get("RANK"), process) for process in processes)
        return {int(rank): process for rank, process in ranks if rank is not None}

    def end(self) -> None:
        for started in self._started:
            if started.poll() is None:
                for child in psutil.Process(started.pid).children(recursive=True):
                    child.kill()
                started.kill()
                started.wait()


@pytest.fixture
def training(request, tmp_path) -> Iterator[Training]:
    started = Training(tmp_path, request.param)
    yield started
    started.end()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("training", "how", "who", "number"),
    GRIEFS,
    ids=[f"{launcher}-{how.name}-{who}-{number}" for launcher, how, who, number in GRIEFS],
    indirect=["training"],
)
def test_survivors_name_who_is_gone(training, how, who, number):
    training.wait_for_iterations()
    ranks = training.ranks()
    time.sleep(random.Random(f"{how} {who} {number}").uniform(0, 5))
    os.kill(ranks[who].pid, how)
    began = time.monotonic()
    survivors = ranks.keys() - {who}
    named: dict[int, float] = {}
    while len(named) < len(survivors):
        took = time.monotonic() - began
        assert took < TIMEOUT_S + 60, {rank: training.log(rank)[-2000:] for rank in survivors - named.keys()}
        named |= {rank: took for rank in survivors - named.keys() if "hexi: error:" in training.log(rank)}
        time.sleep(0.1)
    _, left = psutil.wait_procs([ranks[rank] for rank in survivors], timeout=10)
    # torchrun waits for the stopped rank before it asks after the others.
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)
    for rank in survivors:
        [line] = [line for line in training.log(rank).splitlines() if line.startswith("hexi: error:")]
        print(f"{named[rank]:.1f} s: {line}")
        assert f"lost rank {who} on host" in line
        assert "This rank was in megatron" in line
    assert max(named.values()) < (KILLED_S if how == signal.SIGKILL else STOPPED_S)
