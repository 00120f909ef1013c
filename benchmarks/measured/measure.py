"""One scenario: the cluster is probed once, everything is planned from that, then run round by round."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measured.launch import Run, RunFailed, on_testbed, train
from benchmarks.measured.layouts import Layout, find_layouts
from benchmarks.measured.results import Measured, ScenarioResult
from benchmarks.measured.scenarios import Scenario
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost.ceiling import attention_seconds, ceiling_tokens_per_s, token_seconds
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.planner.planner import find_plan

#: Losses of one model differ by less; Megatron draws other first weights for other stages and sizes of units.
_ALIKE, _ROUGHLY = 1e-3, 0.02
#: Told what is being done.
Say = Callable[[str], None]


def measure(
    scenario: Scenario,
    folder: Path,
    *,
    rounds: int,
    iterations: int,
    probed: Path | None,
    say: Say,
) -> ScenarioResult:
    """Probe, plan, and train by every layout in turn.

    Args:
        scenario: what is measured.
        folder: for logs; new.
        rounds: how often every layout is run; they take turns.
        iterations: timed in each run.
        probed: a cluster file from an earlier probe; ``None``: probe now.
        say: told of every run.
    """
    folder.mkdir(parents=True)
    if probed is None:
        say("probing")
        probed = folder.resolve() / "probed.yaml"
        options = ("--precision", "fp32", "--quick", "-o", str(probed))
        probe = ["-m", "megatron_hexi.cli.main", "probe", *options]
        on_testbed(scenario.file, folder / "probe", probe, scenario.speeds)
    cluster = read_cluster(probed)
    missing: dict[str, str] = {}
    if scenario.layouts is not None:
        layouts = scenario.layouts(scenario, cluster)
    else:
        planned = find_plan(scenario.request, cluster, with_baselines=True)
        layouts, missing = find_layouts(planned, cluster, {"usp"} if scenario.is_free else None)
    runs: dict[str, list[Run]] = {layout.name: [] for layout in layouts}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for layout in layouts:
            if layout.name in failed:
                continue
            say(f"round {number + 1} of {rounds}: {layout.name}")
            here = folder / f"{number}-{layout.name.replace(', ', '+')}"
            try:
                runs[layout.name].append(train(scenario, layout, here, iterations))
            except RunFailed as problem:
                failed[layout.name] = str(problem)
                say(f"{layout.name}: {problem}")
    # Stages, and Megatron's expert-parallel ranks, draw their first weights from generators of their own.
    draws_alike = not (scenario.is_free or scenario.layouts or scenario.experts)
    _check_losses(runs, _ALIKE if draws_alike else _ROUGHLY)
    return ScenarioResult(
        name=scenario.name,
        decides=scenario.decides,
        seq_length=scenario.seq_length,
        speeds=scenario.speeds,
        ceiling_tokens_per_s=ceiling_tokens_per_s(scenario.job, [rank.device for rank in cluster.ranks]),
        attention_share=_attention_share(scenario, cluster),
        layouts=[_measured(layout, runs[layout.name], failed.get(layout.name, "")) for layout in layouts],
        missing=missing,
        testbed=_testbed(runs),
        versions={
            name: importlib.metadata.version(name) for name in ("megatron-hexi", "megatron-core", "torch")
        }
        | {"python": platform.python_version()},
        date=datetime.date.today().isoformat(),
        batch=scenario.batch,
    )


def _measured(layout: Layout, runs: Sequence[Run], failed: str) -> Measured:
    return Measured(
        name=layout.name,
        text=layout.text,
        uniform=layout.uniform,
        gpus=len(layout.gpus),
        predicted_s=layout.predicted_s,
        seconds=[list(run.seconds) for run in runs],
        failed=failed,
        beside=layout.beside,
    )


def _check_losses(runs: dict[str, list[Run]], most: float = _ALIKE) -> None:
    """All layouts train the same model on the same data: their losses are the same, up to a part."""
    every = [(name, run.losses) for name, some in runs.items() for run in some]
    for name, losses in every[1:]:
        worst = max(abs(a / b - 1) for a, b in zip(losses, every[0][1], strict=True))
        if worst > most:
            raise RunFailed(f"{name}: losses {losses} are not {every[0][1]} of {every[0][0]}")


def _attention_share(scenario: Scenario, cluster: Cluster) -> float:
    """Part of the compute that is attention, over all ranks at their best."""
    attention = token = 0.0
    for rank in cluster.ranks:
        speeds = device_speeds(rank.device, scenario.job)
        attention += 1 / attention_seconds(speeds, scenario.job, causal=True)
        token += 1 / token_seconds(speeds, scenario.job)
    return token / (token + attention)


def _testbed(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """What the testbed measured of itself; all runs one below the other."""
    return {name: [run.testbed for run in some] for name, some in runs.items()}
