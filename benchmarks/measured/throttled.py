"""A GPU that slows inside a stage of two unequal ones: the plan kept, followed, and the best of its groups.

    python -m benchmarks.measured.throttled

Real training on the emulated cluster `unequal-stages`: two ranks share the sequences of the first stage,
which has three of four layers; one rank has the second. Four trainings of equal weights and data:

- steady: no GPU slows, and the plan is followed; it must never be swapped
- kept, followed: a GPU of the first stage slows; without and with ``--hexi-replan-interval``
- best: the plan that the planner cuts for the slowed GPU, from the first iteration on

All losses must agree. What following wins is set beside what the best plan wins:
(kept - followed) / (kept - best), by the median of each training's last iterations.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measured.launch import RunFailed, on_testbed
from benchmarks.measured.scenarios import Scenario, words
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.plan import Plan, plan_from_yaml, write_plan
from megatron_hexi.replan.planning.recut import recut
from megatron_hexi.yaml_file import yaml_from_text

SCENARIO = Scenario("throttled", "unequal-stages", 512, "a GPU that slows", sizes=(4, 256, 1024), batch=4)
#: The GPU that slows.
SLOWED = 1
#: Iterations between two looks at the plan, and how many at the end of a training are compared.
INTERVAL, LAST = 5, 8
LOSSES_WITHIN = 1e-5
_PLAN = """\
version: 2
workload: {seq_length: 512, heads: 8, kv_heads: 4, head_dim: 64, layers: 4}
job: {micro_batch_size: 1}
replicas:
- stages:
  - layers: [0, 3]
    domains:
    - groups:
      - segments: [[0, 512]]
        members: [{ranks: [0], tokens: 256, heads: [0, 4]}, {ranks: [1], tokens: 256, heads: [4, 8]}]
  - {layers: [3, 4], domains: [{ranks: [2]}]}
"""
_SWAP = re.compile(r"hexi: replan: iteration (\d+): swapped to plan \w+ in ([\d.]+) ms")


@dataclass(frozen=True)
class Training:
    """One training.

    Args:
        seconds: seconds of each iteration, on the slowest rank.
        losses: loss of each iteration.
        swaps: iterations before which plans were swapped.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    swaps: tuple[int, ...]

    @property
    def last_s(self) -> float:
        """Median seconds of the last iterations."""
        return statistics.median(self.seconds[-LAST:])


def first_plan(cluster: Cluster) -> Plan:
    """Return the plan that all but one training begin with: `_PLAN`, cut for the cluster."""
    plan = plan_from_yaml(yaml_from_text(Path("throttled.py"), _PLAN))
    return recut(plan, SCENARIO.job, cluster)


def train(plan: Plan, folder: Path, iterations: int, throttle: str | None, is_followed: bool) -> Training:
    """Train on the emulated cluster.

    Args:
        plan: the plan.
        folder: a new folder for files and logs.
        iterations: number of iterations.
        throttle: as ``hexi testbed --throttle`` has it; ``None``: no GPU slows.
        is_followed: whether the plan follows the cluster.

    Raises:
        RunFailed: the training failed, or what was emulated is off.
    """
    folder.mkdir(parents=True)
    folder = folder.resolve()
    write_plan(plan, folder / "plan.yaml")
    followed = {"--hexi-cluster": SCENARIO.file, "--hexi-replan-interval": INTERVAL}
    options = {
        **SCENARIO.arguments(iterations),
        "--hexi-plan": folder / "plan.yaml",
        "--hexi-metrics": folder / "rank-{rank}.jsonl",
        **(followed if is_followed else {}),
    }
    program = ["-m", "megatron_hexi.pretrain_gpt", *words(options)]
    on_testbed(SCENARIO.file, folder / "testbed", program, "paced", throttles=[throttle] if throttle else [])
    ranks = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank-*.jsonl"))
    ]
    logs = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("testbed/*rank-0.log")))
    return Training(
        seconds=tuple(max(line["seconds"] for line in lines) for lines in zip(*ranks, strict=True)),
        losses=tuple(line["loss"] for line in next(lines for lines in ranks if "loss" in lines[0])),
        swaps=tuple(int(iteration) for iteration, _ in _SWAP.findall(logs)),
    )


def compare(folder: Path, iterations: int, speed: float) -> int:
    """Run all trainings, and print what they took.

    Args:
        folder: for files and logs.
        iterations: length of each training; the GPU slows after a quarter of it.
        speed: part of its speed that the slowed GPU keeps.

    Returns:
        0, or 1 where losses differ, a steady cluster was swapped, or a slowed one was not.
    """
    cluster, job = read_cluster(SCENARIO.file), SCENARIO.job
    plan, slowed = first_plan(cluster), cluster.at_speeds({SLOWED: speed})
    best = recut(plan, job, slowed)
    predicted = {
        name: CostModel(job, slowed).timing(one).phases.total
        for name, one in (("kept", plan), ("best", best))
    }
    _say(f"predicted with the slowed GPU: {predicted['kept']:.2f} s kept, {predicted['best']:.2f} s best")
    found = {"steady": train(plan, folder / "steady", iterations, None, is_followed=True)}
    _say(_words("steady", found["steady"]))
    begin = round(found["steady"].last_s * iterations / 4)
    late, whole = f"{SLOWED}={speed}@{begin}..", f"{SLOWED}={speed}@0.."
    for name, own, throttle, is_followed in (
        ("kept", plan, late, False),
        ("followed", plan, late, True),
        ("best", best, whole, False),
    ):
        found[name] = done = train(own, folder / name, iterations, throttle, is_followed)
        _say(_words(name, done))
    still = found["steady"].losses
    apart = max(
        abs(own / other - 1) for done in found.values() for own, other in zip(done.losses, still, strict=True)
    )
    kept, followed, fastest = (found[name].last_s for name in ("kept", "followed", "best"))
    print(
        f"losses within {apart:.1e}; won {(kept - followed) / (kept - fastest):.0%} of what the best cut wins"
    )
    return int(apart > LOSSES_WITHIN or bool(found["steady"].swaps) or not found["followed"].swaps)


def _words(name: str, done: Training) -> str:
    return f"{name}: {done.last_s:.2f} s, swaps {list(done.swaps)}, load {os.getloadavg()[0]:.0f}"


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        argv: the command line's; ``None``: the process's own.

    Returns:
        See `compare`; 1 also where a training failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measured.throttled",
        description=__doc__,
        epilog="Example: python -m benchmarks.measured.throttled --speed 0.5 --iterations 36",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--iterations", type=int, default=36, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--speed",
        type=float,
        default=0.5,
        metavar="PART",
        help="that the slowed GPU keeps (default %(default)s)",
    )
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="hexi-throttled-"))
    print(f"logs in {folder}", file=sys.stderr)
    try:
        return compare(folder, options.iterations, options.speed)
    except RunFailed as problem:
        print(problem, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
