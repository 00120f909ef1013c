"""Packed documents by a plan's fixed shares, and dealt anew in every batch, in turns.

    python -m benchmarks.measured.batch_shares [--stages]

Real training on the emulated cluster `two-fast-two-slow` with documents of log-normal length. Both sides have
one plan, one data set and the same weights to begin with, so their losses must agree.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from benchmarks.measured.launch import WARM_UP, on_testbed
from benchmarks.measured.scenarios import SCENARIOS, Scenario, words
from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import unit_rates
from megatron_hexi.plan import Domain, Plan, Replica, Stage, proportional_domain, write_plan
from megatron_hexi.planner import find_plan

#: Tokens of the middle document, and the spread of the logarithm.
MEDIAN, SPREAD = 256, 1.0
_VOCABULARY = 512
#: In two stages: with four micro-batches, of two layers each.
STAGES = replace(SCENARIOS[0], name="stages", seq_length=2048, sizes=(4, 256, 768), batch=4)
_SIDES = {"fixed": (), "dealt": ("--hexi-batch-shares",)}


def compare(
    scenario: Scenario, cluster: Path, folder: Path, rounds: int, iterations: int
) -> dict[str, list[list[dict[str, Any]]]]:
    """Train by both sides in turn.

    Args:
        scenario: what is trained.
        cluster: its cluster file.
        folder: for data, plan and logs.
        rounds: runs of each side.
        iterations: timed ones of each.

    Returns:
        Of each side, run and rank the lines of --hexi-metrics, without those of the warm-up.
    """
    plan = (make_plan if scenario is not STAGES else make_stages)(scenario, cluster)
    write_plan(replace(plan, gpus=None), folder / "plan.yaml")
    sequences = (3 + scenario.batch) * (WARM_UP + iterations)
    data = write_documents(folder / "documents", tokens=scenario.seq_length * sequences)
    found: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in _SIDES}
    for number in range(rounds):
        for side, flags in _SIDES.items():
            here = folder / f"{side}-{number}"
            here.mkdir()
            options = {
                **scenario.arguments(WARM_UP + iterations),
                "--data-path": data,
                "--split": "100,0,0",
                "--dataloader-inter-document-masking": None,
                "--no-rope-fusion": None,
                "--hexi-plan": folder / "plan.yaml",
                "--hexi-metrics": here / "rank-{rank}.jsonl",
                **dict.fromkeys(flags),
            }
            del options["--mock-data"]
            program = ["-m", "megatron_hexi.pretrain_gpt", *words(options)]
            on_testbed(cluster, here / "testbed", program, scenario.speeds, plan.gpus or ())
            ranks = [path.read_text().splitlines() for path in sorted(here.glob("rank-*.jsonl"))]
            found[side].append([{"seconds": max(s), "loss": loss} for s, loss in _steps(ranks)][WARM_UP:])
            seconds = statistics.median(step["seconds"] for step in found[side][-1])
            print(f"{side}: {seconds:.3f} s an iteration", file=sys.stderr, flush=True)
    return found


def make_plan(scenario: Scenario, file: Path) -> Plan:
    """The planner's, for sequences of one document, with rates."""
    cluster = read_cluster(file)
    planned = find_plan(scenario.request, cluster)
    return replace(planned.plan, rates=unit_rates(planned.plan, planned.job, cluster))


def make_stages(scenario: Scenario, file: Path) -> Plan:
    """Two stages, each of half the layers and of a device of either node, whose tokens are in proportion."""
    cluster, workload = read_cluster(file), scenario.job.workload()
    count, layers = len(cluster.ranks) // 2, scenario.job.model.layers
    speeds = [[cluster.ranks[rank].device.matmul.rates[-1]] for rank in (0, count)]
    stages = []
    for number in (0, 1):
        groups = tuple(
            replace(group, members=(replace(group.members[0], ranks=(number + place * count,)),))
            for place, group in enumerate(proportional_domain(workload, speeds).groups)
        )
        half = (number * layers // 2, (number + 1) * layers // 2)
        stages.append(Stage((Domain(groups),), layers=half))
    plan = Plan(workload, (Replica(tuple(stages), micro_batches=scenario.batch),))
    return replace(plan, rates=unit_rates(plan, scenario.job, cluster))


def write_documents(prefix: Path, tokens: int) -> Path:
    """A data set of documents of log-normal length, the same each time."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = numpy.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    while tokens > 0:
        length = max(1, int(generator.lognormal(math.log(MEDIAN), SPREAD)))
        text = generator.integers(0, _VOCABULARY - 1, size=length)
        document = numpy.append(text, _VOCABULARY - 1).astype(numpy.uint16)
        builder.add_document(document, [document.size])
        tokens -= document.size
    builder.finalize(f"{prefix}.idx")
    return prefix


def _steps(ranks: Sequence[Sequence[str]]) -> list[tuple[list[float], float]]:
    """Of each iteration the ranks' seconds, and the loss where one knows it."""
    read = [[json.loads(line) for line in lines] for lines in ranks]
    return [
        (
            [line["seconds"] for line in lines],
            next(line["loss"] for line in lines if "loss" in line),
        )
        for lines in zip(*read, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        argv: the command line's; ``None``: the process's own.

    Returns:
        0, or 1 where the losses of the two sides differ.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured.batch_shares", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (default %(default)s)")
    parser.add_argument("--iterations", type=int, default=6, help="timed in each (default %(default)s)")
    parser.add_argument("--stages", action="store_true", help="two stages, of a fast and a slow device each")
    parser.add_argument("--cluster", type=Path, help="a cluster file in place of two-fast-two-slow's")
    options = parser.parse_args(argv)
    scenario = STAGES if options.stages else SCENARIOS[0]
    folder = Path(tempfile.mkdtemp(prefix="hexi-batch-shares-"))
    print(f"logs in {folder}", file=sys.stderr)
    found = compare(scenario, options.cluster or scenario.file, folder, options.rounds, options.iterations)
    medians = {
        side: statistics.median(step["seconds"] for run in runs for step in run)
        for side, runs in found.items()
    }
    apart = max(
        abs(one["loss"] / other["loss"] - 1)
        for first, second in zip(*found.values(), strict=True)
        for one, other in zip(first, second, strict=True)
    )
    for side, seconds in medians.items():
        print(f"{side}: {seconds:.3f} s an iteration")
    print(f"dealt over fixed: {medians['fixed'] / medians['dealt']:.2f}x; losses within {apart:.1e}")
    return int(apart > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
