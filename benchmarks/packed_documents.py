"""Packed documents simulated: equal shares, the plan's own shares, and documents dealt out in every batch.

    python -m benchmarks.packed_documents

Each iteration has random documents, the same for all. Equal shares are those of the fastest layout of
Megatron's flags in which every GPU has as many tokens and heads; ring is the fastest with Megatron's default
--cp-comm-type p2p.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import unit_rates
from megatron_hexi.lab.simulator import draw_documents
from megatron_hexi.models import Job, read_documents, read_model
from megatron_hexi.plan import Plan
from megatron_hexi.planner import Request, find_plan

#: Nodes of eight GPUs, with a card of 400 or 200 Gb/s for each GPU.
CLUSTERS = {
    "16 H100": ("{name: h, count: 2, gpu: H100-SXM-80GB, gpus: 8}", 50),
    "16 H100 + 16 A100": (
        "{name: h, count: 2, gpu: H100-SXM-80GB, gpus: 8}, {name: a, count: 2, gpu: A100-SXM-80GB, gpus: 8}",
        25,
    ),
}
LENGTHS = ("lognormal:300,1.4", "lognormal:1500,1.2")
SEQUENCES = (32768, 65536, 131072)


@dataclass(frozen=True)
class Outcome:
    """Seconds of an iteration in the mean of random documents; ``None``: no layout fits."""

    ring_s: float | None
    equal_s: float | None
    cut_s: float
    dealt_s: float


def simulate(cluster: Cluster, model: str, seq_length: int, lengths: str, batch: int) -> Outcome:
    """Plan a job three times, and draw documents for each plan.

    Args:
        lengths: value of --document-lengths without the longest document, which is the sequence.
        batch: sequences of an iteration.
    """
    cut = read_documents(f"{lengths},{seq_length}")
    job = Job(read_model(model), seq_length, global_batch_size=batch, documents=cut)
    planned = find_plan(Request(job), cluster, with_baselines=True)
    equal = {item.name: item.trial for item in planned.baselines if item.uniform and item.trial is not None}
    ring = equal.get("ring")
    fastest = min(equal.values(), key=lambda trial: trial.iteration_s, default=None)
    dealt = find_plan(Request(replace(job, documents=replace(cut, dealt=True))), cluster)
    rates = unit_rates(dealt.plan, replace(dealt.job, documents=None), cluster)
    return Outcome(
        None if ring is None else _seconds(ring.plan, ring.job, cluster),
        None if fastest is None else _seconds(fastest.plan, fastest.job, cluster),
        _seconds(planned.plan, planned.job, cluster),
        _seconds(replace(dealt.plan, rates=rates), dealt.job, cluster),
    )


def _seconds(plan: Plan, job: Job, cluster: Cluster) -> float:
    return draw_documents(plan, job, cluster).mean_s


def _rows(model: str, batch: int, only: str) -> Iterator[str]:
    for name, (nodes, bandwidth) in CLUSTERS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cluster.yaml"
            network = f"{{bandwidth_gb_s: {bandwidth}, latency_us: 10, per: gpu}}"
            path.write_text(f"name: benchmark\nnodes: [{nodes}]\nnetwork: {network}\n")
            cluster = read_cluster(path)
        for lengths in LENGTHS:
            for seq_length in SEQUENCES:
                cell = f"{name} | {lengths} | {seq_length // 1024}K"
                if only not in cell:
                    continue
                found = simulate(cluster, model, seq_length, lengths, batch)
                times = [found.ring_s, found.equal_s, found.cut_s, found.dealt_s]
                spelt = " | ".join("-" if time is None else f"{time:.2f}" for time in times)
                gains = ["-" if time is None else f"{time / found.dealt_s:.2f}x" for time in times[:3]]
                yield f"| {cell} | {spelt} | {' | '.join(gains)} |"


def main(words: Sequence[str] | None = None) -> int:
    """Print the table.

    Args:
        words: the command line's; ``None``: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_documents", description=__doc__)
    parser.add_argument("--model", default="llama3-8b", help="a preset or config.json (default %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences an iteration (default %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows that contain this, as '128K'")
    options = parser.parse_args(words)
    print("| GPUs | documents | sequence | ring | equal | cut | dealt out | against ring | equal | cut |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in _rows(options.model, options.batch, options.only):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
