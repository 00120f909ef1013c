"""The job whose goodput is measured: a small GPT on three emulated nodes, whose GPUs are paced CPUs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: Ranks of each node.
NODES = {"n0": 2, "n1": 1, "n2": 1}
BATCH = 12
#: Iterations between checkpoints, in both ways.
SAVE_INTERVAL = 20
#: At this speed an iteration of `_MODEL` on all ranks takes about two seconds.
_TFLOPS = 0.004
_CURVE = f"{{points: [[1, {_TFLOPS}]], estimate: chosen}}"
#: Nodes that are alike, so that torchrun, which numbers ranks as their agents come, can carry out the plan.
_CLUSTER = f"""\
name: goodput
nodes:
{{nodes}}network: {{{{bandwidth_gb_s: 10, latency_us: 20, per: node}}}}
devices:
  cpu-core:
    memory_gb: 4
    usable_gib: 3.5
    memory_gb_s: 1000
    capability: [0, 0]
    nominal: {{{{bf16: {_TFLOPS}, fp32: {_TFLOPS}}}}}
    link: {{{{kind: host, bandwidth_gb_s: 10, latency_us: 20, estimate: chosen}}}}
    matmul: {{curve}}
    attention:
      aten-cpu:
        causal: {{{{forward: {{curve}}, backward: {{curve}}}}}}
        full: {{{{forward: {{curve}}, backward: {{curve}}}}}}
"""
_MODEL = (
    *("--num-layers", "4", "--hidden-size", "256", "--ffn-hidden-size", "1024", "--num-attention-heads", "4"),
    *("--kv-channels", "64", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--vocab-size", "127"),
    *("--seq-length", "128", "--max-position-embeddings", "128"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--global-batch-size", str(BATCH)),
)
_TRAINING = (
    *("--lr", "1e-4", "--lr-decay-iters", "100000", "--mock-data", "--tokenizer-type", "NullTokenizer"),
    *("--num-workers", "0", "--eval-iters", "0", "--eval-interval", "100000", "--log-interval", "100000"),
    *("--hexi-platform", "cpu", "--distributed-timeout-minutes", "1"),
)


@dataclass(frozen=True)
class GoodputJob:
    """A job, and the files that it shares with its trials.

    Args:
        cluster: the cluster file.
        plan: the plan for all of its nodes.
        words: Megatron's arguments.
        copy_interval: iterations between copies in memory, under `megatron_hexi.elastic`.
    """

    cluster: Path
    plan: Path
    words: tuple[str, ...]
    copy_interval: int


def make_job(folder: Path, iterations: int, speed: float, copy_interval: int) -> GoodputJob:
    """Write the cluster file, and plan the job as a user does.

    Args:
        folder: for the files; exists.
        iterations: length of the training.
        speed: factor on the emulated GPUs' rates; 1: an iteration takes about two seconds.
        copy_interval: iterations between copies in memory.

    Raises:
        subprocess.CalledProcessError: `hexi plan` failed; it has said why.
    """
    lines = (f"- {{name: {n}, gpu: cpu-core, gpus: {gpus}, speed: {speed}}}\n" for n, gpus in NODES.items())
    cluster, model, plan = (folder.resolve() / name for name in ("cluster.yaml", "job.args", "plan.yaml"))
    cluster.write_text(_CLUSTER.format(nodes="".join(lines), curve=_CURVE))
    model.write_text(" ".join(_MODEL))
    hexi = (sys.executable, "-m", "megatron_hexi.cli.main", "plan", str(cluster), "--model", str(model))
    subprocess.run([*hexi, "--precision", "fp32", "-o", str(plan)], check=True, stdout=subprocess.DEVNULL)
    own = ("--train-iters", str(iterations), "--hexi-plan", str(plan))
    saving = ("--save", "checkpoints", "--load", "checkpoints", "--save-interval", str(SAVE_INTERVAL))
    return GoodputJob(cluster, plan, (*_MODEL, *_TRAINING, *own, *saving), copy_interval)
