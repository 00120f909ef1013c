"""One layout on the emulated cluster: real Megatron training, timed by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measured.layouts import Layout
from benchmarks.measured.scenarios import Scenario, words
from megatron_hexi.models import job_terms
from megatron_hexi.plan import write_plan

#: Iterations that warm up: the first builds buffers and connections.
WARM_UP = 1
#: A run that takes longer hangs.
_TIMEOUT_S = 900
_HEXI = (sys.executable, "-m", "megatron_hexi.cli.main")


class RunFailed(Exception):
    """A run on the testbed failed; the message says where its log is."""


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        seconds: of each iteration after the warm-up, on the slowest rank.
        losses: of all iterations.
        testbed: what the testbed measured of itself.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    testbed: dict[str, Any]


def train(scenario: Scenario, layout: Layout, folder: Path, iterations: int) -> Run:
    """Train by a layout.

    Args:
        scenario: what is trained.
        layout: how.
        folder: new; logs go there.
        iterations: timed ones.

    Raises:
        RunFailed: the job or the testbed failed.
    """
    folder.mkdir(parents=True)
    plan, metrics = folder.resolve() / "plan.yaml", folder.resolve() / "rank-{rank}.jsonl"
    job = layout.job
    written = replace(layout.plan, gpus=None)  # the cluster has no other GPUs
    open_terms = {"kernel"} if written.is_repeated else {"kernel", "recompute"}  # stages say it
    open_terms |= {
        "lora_rank",
        "fp8_recipe",
    }  # no scenario has adapters or fp8, without which they are refused
    stated = {term: value for term, value in vars(job).items() if term not in open_terms}
    write_plan(replace(written, job=job_terms(stated, written)), plan)
    sizes = {
        "--tensor-model-parallel-size": job.tensor_parallel,
        "--pipeline-model-parallel-size": job.pipeline_parallel,
        "--context-parallel-size": len(layout.gpus) // job.tensor_parallel // job.pipeline_parallel,
    }
    options = {
        **scenario.arguments(WARM_UP + iterations),
        **(sizes if written.is_repeated else {}),
        "--hexi-plan": plan,
        "--hexi-metrics": metrics,
    }
    program = ["-m", "megatron_hexi.pretrain_gpt", *words(options)]
    on_testbed(scenario.file, folder / "testbed", program, scenario.speeds, layout.gpus)
    ranks = [_read(Path(str(metrics).format(rank=rank))) for rank in range(len(layout.gpus))]
    steps = [max(rank[step]["seconds"] for rank in ranks) for step in range(WARM_UP + iterations)]
    return Run(
        seconds=tuple(steps[WARM_UP:]),
        losses=tuple(line["loss"] for line in next(rank for rank in reversed(ranks) if rank)),
        testbed=json.loads((folder / "testbed" / "testbed.json").read_text()),
    )


def on_testbed(
    cluster: Path,
    folder: Path,
    program: list[str],
    speeds: str,
    gpus: Sequence[int] = (),
    throttles: Sequence[str] = (),
) -> None:
    """Run a program on the emulated cluster, on all of it or some of its devices, of which some may slow.

    Raises:
        RunFailed: it failed, or the testbed is off.
    """
    some = ["--gpus", ",".join(map(str, gpus))] if gpus else []
    some += [word for throttle in throttles for word in ("--throttle", throttle)]
    command = [*_HEXI, "testbed", "run", str(cluster), "--speeds", speeds, *some, "-o", str(folder)]
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        done = subprocess.run(
            [*command, "--", *program],
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RunFailed(f"exit code {done.returncode}; the end of {log}:\n{tail}")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
