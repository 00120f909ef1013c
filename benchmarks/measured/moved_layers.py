"""A GPU that slows inside a pipeline of three stages: its layers kept, moved in the job, and cut best.

    python -m benchmarks.measured.moved_layers

Real training under `megatron_hexi.elastic` on three nodes of one paced GPU each, of equal speed until the
middle one slows. Three trainings on equal data:

- kept, followed: the middle GPU slows; without and with ``--hexi-replan-interval``
- best: the fastest cut of the layers for the slowed GPU, of all, from the first iteration on

Losses of the first two must agree; the third begins with other weights, drawn by stage. What moving layers
wins is set beside what the best cut wins: (kept - followed) / (kept - best), by the
median of each training's last iterations.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measured import slowed_rank
from benchmarks.measured.scenarios import CLUSTERS, Scenario, words
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.elastic.channel import SECRET_VARIABLE
from megatron_hexi.lab.testbed.job import free_port
from megatron_hexi.plan import Plan, plan_from_yaml, write_plan
from megatron_hexi.yaml_file import yaml_from_text

LAYERS, NODES = 12, 3
SCENARIO = Scenario("moved", "four-equal", 128, "a GPU that slows", sizes=(LAYERS, 256, 768), batch=6)
#: The node that slows, after how many iterations, and how many at the end of a training are compared.
SLOWED, AFTER, LAST = 1, 8, 8
INTERVAL, COPY_INTERVAL, LOSSES_WITHIN, TIMEOUT_S = 5, 2, 1e-5, 900


@dataclass(frozen=True)
class Training:
    """One training: seconds of each iteration, on the slowest rank, its loss, and what our lines said."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    said: tuple[str, ...]

    @property
    def last_s(self) -> float:
        """Median seconds of the last iterations."""
        return statistics.median(self.seconds[-LAST:])


def cut(first: int, second: int) -> Plan:
    """Return the plan whose second and third stage begin with these layers."""
    head = f"workload: {{seq_length: 128, heads: 8, kv_heads: 4, head_dim: 64, layers: {LAYERS}}}"
    bounds = (0, first, second, LAYERS)
    stages = "".join(
        f"  - {{layers: [{bounds[n]}, {bounds[n + 1]}], domains: [{{ranks: [{n}]}}]}}\n" for n in range(NODES)
    )
    text = f"version: 2\n{head}\njob: {{micro_batch_size: 1}}\nreplicas:\n- stages:\n{stages}"
    return plan_from_yaml(yaml_from_text(Path("moved_layers.py"), text))


def best_cut(cluster: Cluster) -> Plan:
    """Return the fastest plan of all cuts into three stages."""
    model = CostModel(SCENARIO.job, cluster)
    cuts = [cut(first, second) for second in range(2, LAYERS) for first in range(1, second)]
    return min(cuts, key=lambda plan: model.timing(plan).phases.total)


def write_cluster(folder: Path) -> Cluster:
    """Write the file of a cluster of three nodes of one GPU each, and return the cluster."""
    text = (CLUSTERS / "four-equal.yaml").read_text().replace("count: 2", f"count: {NODES}")
    path = folder / slowed_rank.CLUSTER
    path.write_text(text.replace("gpus: 2", "gpus: 1"))
    return read_cluster(path)


def train(plan: Plan, folder: Path, iterations: int, speed: float, is_followed: bool, after: int) -> Training:
    """Train; the GPU slows after some iterations.

    Args:
        folder: a new folder for files and logs.

    Raises:
        RuntimeError: the training failed.
    """
    folder.mkdir(parents=True)
    cluster = write_cluster(folder)
    write_plan(plan, folder / "plan.yaml")
    (folder / "memory").mkdir()
    options = {
        **SCENARIO.arguments(iterations),
        "--hexi-plan": "plan.yaml",
        "--hexi-cluster": slowed_rank.CLUSTER,
        "--hexi-metrics": folder / "rank-{rank}.jsonl",
        "--save": "checkpoints",
        "--save-interval": 1000,
        **({"--hexi-replan-interval": INTERVAL} if is_followed else {}),
    }
    launch = {
        "--nnodes": f"{NODES}:{NODES}",
        "--nproc-per-node": 1,
        "--rdzv-endpoint": f"localhost:{free_port()}",
        "--local-addr": "localhost",
        "--copy-interval": COPY_INTERVAL,
        "--copy-folder": folder / "memory",
        "--script": Path(slowed_rank.__file__).resolve(),
    }
    environment = os.environ | {
        SECRET_VARIABLE: secrets.token_hex(32),
        "SLOWED": f"{SLOWED}={speed}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if not after:
        (folder / slowed_rank.SLOWED).touch()
    agents = []
    try:
        for node in cluster.nodes:
            command = [
                sys.executable,
                "-m",
                "megatron_hexi.elastic",
                "--node",
                node.name,
                *words(launch),
                "--",
            ]
            with (folder / f"{node.name}.log").open("wb") as log:
                agents.append(
                    subprocess.Popen(
                        [*command, *words(options)], cwd=folder, env=environment, stdout=log, stderr=log
                    )
                )
        until = time.monotonic() + TIMEOUT_S
        while any(agent.poll() is None for agent in agents) and time.monotonic() < until:
            if len(_lines(folder)) >= after:
                (folder / slowed_rank.SLOWED).touch()
            time.sleep(0.1)
    finally:
        for agent in agents:
            agent.terminate()
    if any(agent.wait() for agent in agents):
        raise RuntimeError(f"the training in {folder} failed; look at its logs")
    lines = _lines(folder)
    logs = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))
    return Training(
        seconds=tuple(max(line["seconds"] for line in lines[number]) for number in sorted(lines)),
        losses=tuple(
            next(line["loss"] for line in lines[number] if "loss" in line) for number in sorted(lines)
        ),
        said=tuple(re.findall(r"hexi: (?:replan|elastic): (iteration .*)", logs)),
    )


def _lines(folder: Path) -> dict[int, list[dict[str, float]]]:
    """Return what ranks wrote of each iteration."""
    lines: dict[int, list[dict[str, float]]] = defaultdict(list)
    for path in folder.glob("rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            lines[line["iteration"]].append(line)
    return lines


def compare(folder: Path, iterations: int, speed: float) -> int:
    """Run all trainings, and print what they took.

    Args:
        folder: for files and logs.
        iterations: length of each training.
        speed: part of its speed that the slowed GPU keeps.

    Returns:
        0, or 1 where losses differ, or no layers moved.
    """
    cluster = write_cluster(folder)
    slowed = cluster.at_speeds({cluster.nodes[SLOWED].ranks[0]: speed})
    even, best = best_cut(cluster), best_cut(slowed)
    found = {}
    for name, own, is_followed, after in (
        ("kept", even, False, AFTER),
        ("followed", even, True, AFTER),
        ("best", best, False, 0),
    ):
        found[name] = done = train(own, folder / name, iterations, speed, is_followed, after)
        predicted = CostModel(SCENARIO.job, slowed).timing(own).phases.total
        layers = " + ".join(str(stage.layers[1] - stage.layers[0]) for stage in own.stages if stage.layers)
        print(
            f"{name}, {layers} layers: {done.last_s:.2f} s, begins as predicted with the slowed GPU: "
            f"{predicted:.2f} s; load {os.getloadavg()[0]:.0f}",
            *done.said if is_followed else (),
            sep="\n  ",
            flush=True,
        )
    pairs = zip(found["followed"].losses, found["kept"].losses, strict=True)
    apart = max(abs(own / other - 1) for own, other in pairs)
    kept, followed, fastest = (found[name].last_s for name in ("kept", "followed", "best"))
    won = (kept - followed) / (kept - fastest)
    print(f"losses within {apart:.1e}; won {won:.0%} of what the best cut wins")
    return int(apart > LOSSES_WITHIN or not any("starts again" in line for line in found["followed"].said))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return what `compare` does."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured.moved_layers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--iterations", type=int, default=44, metavar="N", help="default %(default)s")
    keeps = "part of its speed that the slowed GPU keeps (default %(default)s)"
    parser.add_argument("--speed", type=float, default=0.5, metavar="PART", help=keeps)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="hexi-moved-"))
    print(f"logs in {folder}", file=sys.stderr)
    return compare(folder, options.iterations, options.speed)


if __name__ == "__main__":
    sys.exit(main())
