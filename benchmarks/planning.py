"""`python -m benchmarks.planning`: how long planning takes, and how much memory, by the number of GPUs.

A quarter of the GPUs is of each of four models, 8 a node, 25 GB/s between nodes for each GPU; a million
tokens, and nothing fixed. Each plan is found in a process of its own, so that one's peak of memory is not
another's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import Job, read_model
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.planner import Request, find_plan

DEVICES = ("H100-SXM-80GB", "A100-SXM-80GB", "A800-SXM-80GB", "L40S-48GB")
NODE = 8
MODELS = ("gpt-7b", "gpt-13b")
GPUS = (128, 1024, 4096)
MIB = 2**20
#: getrusage counts kilobytes on Linux, bytes on macOS.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Row:
    """One plan.

    Args:
        gpus: of the cluster.
        model: a preset.
        seq_length: context.
        planning_s: wall time of `find_plan`.
        cpu_s: processor time of the same.
        peak_mib: by how much the process's peak of memory grew meanwhile.
        trials: layouts that were timed.
        gap: how far from the lower bound the plan is; ``None`` where nothing fits.
        replicas: of the plan.
        stages: of them all.
    """

    gpus: int
    model: str
    seq_length: int
    planning_s: float
    cpu_s: float
    peak_mib: float
    trials: int | None
    gap: float | None
    replicas: int | None
    stages: int | None


def mixed_cluster(gpus: int) -> Cluster:
    """Nodes of the four models in equal numbers, as far as there are enough."""
    nodes = gpus // NODE
    shares = [nodes // len(DEVICES) + (place < nodes % len(DEVICES)) for place in range(len(DEVICES))]
    entries = [
        f"- {{name: {device.split('-')[0].lower()}, count: {count}, gpu: {device}, gpus: {NODE}}}\n"
        for device, count in zip(DEVICES, shares, strict=True)
        if count
    ]
    network = "network: {bandwidth_gb_s: 25, latency_us: 10, per: gpu}\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(f"name: mixed-{gpus}\nnodes:\n{''.join(entries)}{network}", encoding="utf-8")
        return read_cluster(path)


def measure(gpus: int, model: str, seq_length: int) -> Row:
    """Plan once, in this process."""
    cluster = mixed_cluster(gpus)
    request = Request(Job(read_model(model), seq_length))
    peak, begun, busy = _peak_mib(), time.perf_counter(), time.process_time()
    trials = gap = replicas = stages = None
    try:
        planned = find_plan(request, cluster)
        trials, gap, replicas = planned.trials, planned.gap, len(planned.plan.replicas)
        stages = sum(len(replica.stages) for replica in planned.plan.replicas)
    except NothingFitsError:
        pass
    taken, used = time.perf_counter() - begun, time.process_time() - busy
    grown = _peak_mib() - peak
    return Row(gpus, model, seq_length, taken, used, grown, trials, gap, replicas, stages)


def measure_all(gpus: Sequence[int], seq_length: int) -> list[Row]:
    """Every size with every model, each in a process of its own, one after the other."""
    rows = []
    for size, model in itertools.product(gpus, MODELS):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows.append(pool.submit(measure, size, model, seq_length).result())
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--gpus", type=_size, nargs="+", default=GPUS, metavar="N", help="multiples of 8")
    parser.add_argument("--seq-length", type=int, default=2**20, metavar="TOKENS")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args(words)
    rows = measure_all(options.gpus, options.seq_length)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    print("  GPUs  model     planning      CPU    memory  layouts    gap  replicas  stages")
    for row in rows:
        end = "nothing fits"
        if row.gap is not None:
            end = f"{row.trials:7d}  {row.gap:5.1%}  {row.replicas:8d}  {row.stages:6d}"
        print(
            f"{row.gpus:6d}  {row.model:8} {row.planning_s:6.2f} s {row.cpu_s:6.2f} s  "
            f"{row.peak_mib:4.0f} MiB  {end}"
        )
    return 0


def _size(text: str) -> int:
    size = int(text)
    if size < NODE or size % NODE:
        raise argparse.ArgumentTypeError(f"{text} is no multiple of {NODE}")
    return size


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / MIB


if __name__ == "__main__":
    sys.exit(main())
