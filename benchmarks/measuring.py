"""`python -m benchmarks.measuring`: what an iteration takes longer where the waits in it are measured.

One training on two ranks and the CPU, of a small model, looks at its plan every 20
iterations (`--hexi-replan-interval`) and measures every second one (`--hexi-metrics-interval 2`): measured
iterations and others alternate, so that whatever else the machine does slows both alike. An iteration lasts
from its begin to the next one's, measuring included; each measured one is held against the two beside it.
Beside other programs that comparison is as noisy as they are. So what one wait costs is timed too, by itself,
and counted as often as an iteration waits, and so is what a rank does before each step to follow its plan.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from benchmarks.measured.scenarios import Scenario, words
from megatron_hexi.plan import proportional_plan, write_plan

ROOT = Path(__file__).resolve().parents[1]
RANKS, LOOKS = 2, 20
#: Iterations that warm up.
WARM_UP = 20
#: By how many one is timed.
_WAITS = 10_000


def run(folder: Path, tokens: int, iterations: int) -> dict[str, Any]:
    """Train.

    Args:
        folder: for the plan and the ranks' times.
        tokens: of a sequence.
        iterations: to be timed.

    Returns:
        What rank 0 saw, as `train` writes it; iterations of the warm-up included.
    """
    scenario = Scenario("measuring", "four-equal", tokens, decides="nothing", sizes=(4, 256, 1024))
    plan = proportional_plan(scenario.job.workload(), [[[1.0] * RANKS]])
    write_plan(replace(plan, gpus=tuple(range(RANKS))), folder / "plan.yaml")
    options = scenario.arguments(WARM_UP + iterations) | {
        "--log-interval": 100_000,
        "--hexi-plan": folder / "plan.yaml",
        "--hexi-cluster": ROOT / scenario.file,
        "--hexi-replan-interval": LOOKS,
        "--hexi-metrics-interval": 2,
    }
    seen = folder / "seen.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run(
        [*launch, "-m", "benchmarks.measuring", "--rank", str(seen), *words(options)], check=True, cwd=ROOT
    )
    found: dict[str, Any] = json.loads(seen.read_text())
    return found


def train(found: Path) -> None:
    """One rank: our own entry point, which notes when each iteration begins."""
    from megatron_hexi import pretrain_gpt
    from megatron_hexi.replan.training.replanning import Replanner
    from megatron_hexi.runtime.waiting import waits_begun

    begun: list[float] = []
    looks: list[float] = []
    original = Replanner.before_step

    def before_step(self: Replanner, iteration: int) -> None:
        begun.append(time.perf_counter())
        original(self, iteration)
        looks.append(time.perf_counter() - begun[-1])

    setattr(Replanner, "before_step", before_step)  # noqa: B010
    pretrain_gpt.main()
    if os.environ["RANK"] == "0":
        waits = waits_begun() / len(begun)
        seen = {"begun": begun, "looks": looks, "waits": waits, "wait_s": _wait_s()}
        found.write_text(json.dumps(seen))


def _wait_s() -> float:
    """Seconds that a measured wait takes longer than one that is not."""
    from megatron_hexi.runtime.waiting import StepMeter, waiting

    def seconds(is_measured: bool) -> float:
        with StepMeter().step(is_measured):
            begun = time.perf_counter()
            for _ in range(_WAITS):
                with waiting("attention"):
                    pass
            return (time.perf_counter() - begun) / _WAITS

    return statistics.median(seconds(True) - seconds(False) for _ in range(9))


def compare(seen: dict[str, Any]) -> dict[str, Any]:
    """What measuring costs, as parts of an iteration; every second one is measured, from 1 on."""
    seconds = dict(enumerate(numpy.diff(seen["begun"]), 1))
    # Posting and reading the times of all ranks falls into the two after a look.
    quiet = {n: value for n, value in seconds.items() if n > WARM_UP and (n - 1) % LOOKS not in (0, 1)}
    ratios = [
        value / statistics.mean((quiet[n - 1], quiet[n + 1]))
        for n, value in quiet.items()
        if n % 2 == 0 and n - 1 in quiet and n + 1 in quiet
    ]
    medians = numpy.median(numpy.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
    middle = statistics.median(quiet.values())
    return {
        "iteration_s": middle,
        "waits": seen["waits"],
        "wait_us": seen["wait_s"] * 1e6,
        "waits_part": seen["waits"] * seen["wait_s"] / middle,
        "looks_part": statistics.mean(seen["looks"][WARM_UP:]) / middle,
        "measured_beside_others": statistics.median(ratios) - 1,
        "from_to": [float(value) - 1 for value in numpy.quantile(medians, [0.025, 0.975])],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--rank"]:
        sys.argv = [sys.argv[0], *given[2:]]
        train(Path(given[1]))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measuring", description=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--iterations", type=int, default=400, help="that are timed")
    asked = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        found = compare(run(Path(folder), asked.tokens, asked.iterations))
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
