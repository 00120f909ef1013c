"""`python -m benchmarks.planning`: how long planning takes, and how much memory, by the number of GPUs.

A quarter of the GPUs is of each of four models, 8 a node, 25 GB/s between nodes for each GPU; a million
tokens, and nothing fixed. `--random N` plans N jobs on random fleets of each size instead: one to four kinds,
4 or 8 GPUs a node, 0.7 to 50 GB/s, 8K to 512K tokens. Each plan is found in a process of its own, so that
one's peak of memory is not another's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request, find_plan

DEVICES = ("H100-SXM-80GB", "A100-SXM-80GB", "A800-SXM-80GB", "L40S-48GB")
NODE = 8
MODELS = ("gpt-7b", "gpt-13b")
GPUS = (128, 1024, 4096)
#: What random fleets are made of.
KINDS = (*DEVICES, "H200-SXM-141GB", "A100-SXM-40GB", "RTX4090-24GB", "A10G-24GB")
NODE_SIZES = (4, 8)
NETWORKS = ((50, "gpu"), (25, "gpu"), (25, "node"), (5, "node"), (0.7, "node"))
RANDOM_MODELS = ("gpt-7b", "gpt-13b", "llama3-8b", "qwen3-32b", "llama3-70b")
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
        global_batch_size: sequences of an iteration.
        fleet: what the cluster consists of.
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
    global_batch_size: int
    fleet: str
    planning_s: float
    cpu_s: float
    peak_mib: float
    trials: int | None
    gap: float | None
    replicas: int | None
    stages: int | None


@dataclass(frozen=True)
class Fleet:
    """Machines to plan for.

    Args:
        nodes: GPU, GPUs a node, and how many nodes.
        network: GB/s between nodes, and for what: each GPU or each node.
    """

    nodes: tuple[tuple[str, int, int], ...]
    network: tuple[float, str] = (25, "gpu")

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return sum(size * count for _, size, count in self.nodes)

    def __str__(self) -> str:
        """In short."""
        nodes = ", ".join(f"{count} x {size} {gpu.split('-')[0]}" for gpu, size, count in self.nodes)
        return f"{nodes}; {self.network[0]} GB/s a {self.network[1]}"

    def cluster(self) -> Cluster:
        """As read from a file."""
        entries = [
            f"- {{name: n{place}, count: {count}, gpu: {gpu}, gpus: {size}}}\n"
            for place, (gpu, size, count) in enumerate(self.nodes)
        ]
        rate, per = self.network
        network = f"network: {{bandwidth_gb_s: {rate}, latency_us: 10, per: {per}}}\n"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cluster.yaml"
            path.write_text(f"name: fleet\nnodes:\n{''.join(entries)}{network}", encoding="utf-8")
            return read_cluster(path)


def mixed_fleet(gpus: int) -> Fleet:
    """Nodes of the four models in equal numbers, as far as there are enough."""
    nodes = gpus // NODE
    shares = [nodes // len(DEVICES) + (place < nodes % len(DEVICES)) for place in range(len(DEVICES))]
    return Fleet(tuple((gpu, NODE, count) for gpu, count in zip(DEVICES, shares, strict=True) if count))


def random_task(gpus: int, seed: int) -> tuple[Fleet, Job]:
    """A random fleet of so many GPUs, and a job for it; the same ones for a seed."""
    draw = random.Random(f"{gpus} {seed}")
    kinds = draw.sample(KINDS, draw.randint(1, min(4, gpus // NODE)))
    cuts = sorted(draw.sample(range(1, gpus // NODE), len(kinds) - 1))
    shares = [last - first for first, last in itertools.pairwise([0, *cuts, gpus // NODE])]
    nodes = []
    for kind, share in zip(kinds, shares, strict=True):
        size = draw.choice(NODE_SIZES)
        nodes.append((kind, size, share * NODE // size))
    fleet = Fleet(tuple(nodes), draw.choice(NETWORKS))
    model = draw.choice(RANDOM_MODELS if gpus > 2 * NODE else RANDOM_MODELS[:3])
    seq_length, batch = 2 ** draw.randint(13, 19), 2 ** draw.randint(3, 8)
    return fleet, Job(read_model(model), seq_length, global_batch_size=batch)


def measure(fleet: Fleet, job: Job) -> Row:
    """Plan once, in this process."""
    cluster, request = fleet.cluster(), Request(job)
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
    return Row(
        gpus=fleet.gpus,
        model=job.model.name,
        seq_length=job.seq_length,
        global_batch_size=job.global_batch_size,
        fleet=str(fleet),
        planning_s=taken,
        cpu_s=used,
        peak_mib=grown,
        trials=trials,
        gap=gap,
        replicas=replicas,
        stages=stages,
    )


def measure_all(tasks: Iterable[tuple[Fleet, Job]]) -> Iterator[Row]:
    """Each in a process of its own, one after the other."""
    for fleet, job in tasks:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool.submit(measure, fleet, job).result()


def tasks(gpus: Sequence[int], seq_length: int, fleets: int) -> Iterator[tuple[Fleet, Job]]:
    """Every size with every model, or so many random ones of each size."""
    for size in gpus:
        if fleets:
            yield from (random_task(size, seed) for seed in range(fleets))
        else:
            yield from ((mixed_fleet(size), Job(read_model(model), seq_length)) for model in MODELS)


def main(words: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--gpus", type=_size, nargs="+", default=GPUS, metavar="N", help="multiples of 8")
    parser.add_argument("--seq-length", type=int, default=2**20, metavar="TOKENS")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random fleets of each size")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args(words)
    found = measure_all(tasks(options.gpus, options.seq_length, options.random))
    if options.json:
        print(json.dumps([asdict(row) for row in found], indent=1))
        return 0
    print("  GPUs  model      tokens  batch  planning      CPU    memory  layouts    gap  replicas  stages")
    rows = []
    for row in found:
        rows.append(row)
        end = "nothing fits"
        if row.gap is not None:
            end = f"{row.trials:7d}  {row.gap:5.1%}  {row.replicas:8d}  {row.stages:6d}"
        print(
            f"{row.gpus:6d}  {row.model:10} {row.seq_length:7d} {row.global_batch_size:5d}  "
            f"{row.planning_s:6.2f} s {row.cpu_s:6.2f} s  {row.peak_mib:4.0f} MiB  {end}  {row.fleet}",
            flush=True,
        )
    for size in options.gpus:
        seconds = sorted(row.cpu_s for row in rows if row.gpus == size)
        middle = seconds[len(seconds) // 2]
        print(f"{size} GPUs: {middle:.1f} s of one core in the median, {seconds[-1]:.1f} at most")
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
