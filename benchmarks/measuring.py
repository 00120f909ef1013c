"""`python -m benchmarks.measuring`: what an iteration takes longer where the waits in it are measured.

One training on two ranks and the CPU, of `scripts/testbed/gpt-small.args`, looks at its plan every 20
iterations (`--hexi-replan-interval`) and measures every second one (`--hexi-metrics-interval 2`): measured
iterations and others alternate, so that whatever else the machine does slows both alike. An iteration lasts
from its begin to the next one's, measuring included; each measured one is held against the two beside it.
Iterations that post and read the times of all ranks are told apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from megatron_hexi.plan import proportional_plan, write_plan
from megatron_hexi.plan.model import Workload

ROOT = Path(__file__).resolve().parents[1]
RANKS, LOOKS = 2, 20
#: Iterations that warm up.
WARM_UP = 20
CLUSTER = """\
name: two
nodes: [{name: node, gpu: cpu-core, gpus: 2}]
"""


def run(folder: Path, tokens: int, iterations: int) -> list[float]:
    """Train.

    Args:
        folder: for the plan and the ranks' times.
        tokens: of a sequence.
        iterations: to be timed.

    Returns:
        The seconds of each iteration on rank 0, the warm-up included.
    """
    devices = (ROOT / "scripts/testbed/four-equal.yaml").read_text().split("\nnetwork:", 1)[1]
    (folder / "cluster.yaml").write_text(f"{CLUSTER}network:{devices}")
    workload = Workload(tokens, heads=4, kv_heads=1, head_dim=128, layers=4)
    write_plan(proportional_plan(workload, [[[1.0] * RANKS]]), folder / "plan.yaml")
    words = [
        *(ROOT / "scripts/testbed/gpt-small.args").read_text().split("\n", 1)[1].split(),
        *("--seq-length", str(tokens), "--max-position-embeddings", str(tokens), "--mock-data"),
        *("--micro-batch-size", "1", "--global-batch-size", "1", "--tokenizer-type", "NullTokenizer"),
        *(
            "--train-iters",
            str(WARM_UP + iterations),
            "--lr",
            "1e-4",
            "--eval-iters",
            "0",
            "--eval-interval",
            "100000",
        ),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--log-interval", "100000", "--hexi-platform", "cpu", "--hexi-plan", str(folder / "plan.yaml")),
        *("--hexi-cluster", str(folder / "cluster.yaml"), "--hexi-replan-interval", str(LOOKS)),
        *("--hexi-metrics-interval", "2"),
    ]
    begun = folder / "begun.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run(
        [*launch, "-m", "benchmarks.measuring", "--rank", str(begun), *words], check=True, cwd=ROOT
    )
    return list(numpy.diff(json.loads(begun.read_text())))


def train(begun: Path) -> None:
    """One rank: our own entry point, which notes when each iteration begins."""
    from megatron_hexi import pretrain_gpt
    from megatron_hexi.megatron.replanning import Replanner

    times: list[float] = []
    original = Replanner.before_step

    def before_step(self: Replanner, iteration: int) -> None:
        times.append(time.perf_counter())
        original(self, iteration)

    setattr(Replanner, "before_step", before_step)  # noqa: B010
    pretrain_gpt.main()
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        begun.write_text(json.dumps(times))


def compare(seconds: Sequence[float]) -> dict[str, Any]:
    """What measuring costs, from the seconds of iterations 1, 2, … of which every second one is measured."""
    quiet = {
        number: value
        for number, value in enumerate(seconds, 1)
        # The first look asks the planner, which is another process; posting falls into the one after.
        if number > WARM_UP and (number - 1) % LOOKS not in (0, 1)
    }
    ratios = [
        value / statistics.mean((quiet[number - 1], quiet[number + 1]))
        for number, value in quiet.items()
        if number % 2 == 0 and number - 1 in quiet and number + 1 in quiet
    ]
    generator = numpy.random.default_rng(0)
    medians = numpy.median(generator.choice(ratios, (2000, len(ratios))), axis=1)
    middle = statistics.median(quiet.values())
    looks = [value for number, value in enumerate(seconds, 1) if number > WARM_UP and number not in quiet]
    return {
        "iteration_s": middle,
        "pairs": len(ratios),
        "measuring": statistics.median(ratios) - 1,
        "from_to": [float(value) - 1 for value in numpy.quantile(medians, [0.025, 0.975])],
        "looking": (statistics.median(looks) - middle) * 2 / LOOKS / middle,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    given = list(sys.argv[1:] if words is None else words)
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
