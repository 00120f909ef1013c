"""Predictions by the scenario simulator: of the trials, and of a week on 64 GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.goodput.job import make_job
from benchmarks.goodput.results import Goodput, Predicted, Trial

_HEXI = (sys.executable, "-m", "megatron_hexi.cli.main")
#: A killed rank's node is gone for this moment, and starts again with the others.
_MOMENT_S = 0.01
#: Under torchrun a stopped rank is found out after a minute (gloo's limit), and killed half a minute later
#: (torch's limit for SIGTERM).
_STOPPED_S = 90.0
#: Policies of the simulator: one plans for the nodes that are left, the other waits for the lost one.
_ELASTIC, _RESTARTED = "re-planning", "static"
#: Eight nodes of eight GPUs; a node fails every other day and takes two hours to mend.
_WEEK_CLUSTER = """\
name: h100-64
nodes:
- {name: h100, count: 8, gpu: H100-SXM-80GB, gpus: 8}
network: {bandwidth_gb_s: 50, latency_us: 10, per: gpu}
"""
#: The planner chooses the same sizes by itself; stated, they halve the search for each set of nodes.
_WEEK_SIZES = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
_WEEK_JOB = ("--model", "llama3-8b", "--seq-length", "8192", "--global-batch-size", "512", *_WEEK_SIZES)
_WEEK_FAILURES = "lasts: 7d\nrandom: {seed: 1, failures: {mean_time_between: 2d, repair: 2h}}\n"
#: Assumed, not measured: iterations between copies or checkpoints, and seconds until all train again.
WEEK_ELASTIC, WEEK_RESTARTED = (10, 60), (50, 300)


def predict_run(goodput: Goodput) -> Predicted:
    """Predict the trials: their failures at the seconds at which they came, with the measured restart."""
    settings = goodput.settings
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = make_job(folder, settings.iterations, settings.speed, settings.copy_interval)

        def part(trial: Trial, policy: str, every: int, stopped_s: float) -> float:
            text = "\n".join(_scenario(trial, every, stopped_s, settings.repair_s)) + "\n"
            return _simulate(folder, job.cluster, job.plan, text, policy)

        return Predicted(
            part(goodput.elastic, _ELASTIC, settings.copy_interval, settings.lost_after_s),
            part(goodput.restarted, _RESTARTED, settings.save_interval, _STOPPED_S),
        )


def predict_week() -> Predicted:
    """Predict a week of llama3-8b on 64 H100 whose nodes fail."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster, plan = folder / "cluster.yaml", folder / "plan.yaml"
        cluster.write_text(_WEEK_CLUSTER)
        _run("plan", str(cluster), *_WEEK_JOB, "-o", str(plan))

        def part(policy: str, every: int, restart_s: int) -> float:
            text = f"{_WEEK_FAILURES}recovery: {{checkpoint_every: {every}, restart: {restart_s}s}}\n"
            return _simulate(folder, cluster, plan, text, policy)

        return Predicted(part(_ELASTIC, *WEEK_ELASTIC), part(_RESTARTED, *WEEK_RESTARTED))


def _scenario(trial: Trial, every: int, stopped_s: float, repair_s: float) -> Iterator[str]:
    """Yield the lines of the scenario file of a trial; its time begins with the first iteration."""
    began, ends = trial.began_s, trial.done[-1][0]
    yield f"lasts: {ends - began:.3f}s"
    lasting = {"rank": _MOMENT_S, "stop": stopped_s, "node": repair_s, "two": repair_s}
    if trial.blows:
        yield "lost:"
    for blow in trial.blows:
        at = blow.at_s - began
        yield f"- {{nodes: {blow.nodes[0]}, at: {at:.3f}s, until: {at + lasting[blow.kind]:.3f}s}}"
    yield f"recovery: {{checkpoint_every: {every}, restart: {trial.restart_s():.3f}s}}"


def _simulate(folder: Path, cluster: Path, plan: Path, scenario: str, policy: str) -> float:
    path = folder / "scenario.yaml"
    path.write_text(scenario)
    told = _run("simulate", str(plan), "--cluster", str(cluster), "--scenario", str(path), "--json")
    courses = json.loads(told)["policies"]
    return float(next(course["of_undisturbed"] for course in courses if course["policy"] == policy))


def _run(*words: str) -> str:
    return subprocess.run([*_HEXI, *words], check=True, stdout=subprocess.PIPE, text=True).stdout
