"""`python -m benchmarks.one_gpu`: training on one GPU beside what the cost model says of it.

Slices of models, a few layers deep, train under a plan of one rank, each in a process of its own: seconds of
an iteration, and the most memory that was allocated. What runs is Megatron without Transformer Engine and
apex. Predictions are by the catalogue's figures of the GPU, or by a cluster file that `hexi probe` measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import CostModel, Job, Model, job_terms, model_flags, read_model
from megatron_hexi.errors import user_errors
from megatron_hexi.plan import proportional_plan, write_plan
from megatron_hexi.record import read_record
from megatron_hexi.testbed.ports import free_port
from megatron_hexi.text_file import write_text_atomically

GIB = 2**30
#: Iterations that warm up, and that are timed.
_WARM_UP, _TIMED = 2, 3
#: A training that takes longer hangs.
_TIMEOUT_S = 240
#: In place of Megatron's defaults that need apex or Transformer Engine.
PLAIN = (
    *("--transformer-impl", "local", "--no-rope-fusion", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
)
#: What plans call the kernels of `--hexi-kernel`: what `auto` chooses on Hopper, and the same algorithm.
_KERNELS = {"auto": "cudnn", "aten-flash": "flash-attn-2"}


@dataclass(frozen=True)
class Cell:
    """One training, of two sequences an iteration.

    Args:
        model: a preset's name; its vocabulary is cut to 32,000 words, so that logits leave room.
        layers: as many of them.
        tokens: of a sequence.
        recompute: ``none`` or ``full``.
        kernel: as for ``--hexi-kernel``.
    """

    model: str
    layers: int
    tokens: int
    recompute: Literal["none", "full"] = "none"
    kernel: str = "auto"

    @property
    def name(self) -> str:
        """For tables."""
        recompute = "" if self.recompute == "none" else f", recompute {self.recompute}"
        kernel = "" if self.kernel == "auto" else f", {self.kernel}"
        return f"{self.layers} layers of {self.model}, {self.tokens // 1024}K{recompute}{kernel}"

    @property
    def shapes(self) -> Model:
        """The slice."""
        return replace(read_model(self.model), layers=self.layers, vocab_size=32000)


CELLS = (
    Cell("llama3-8b", 4, 4096),
    Cell("llama3-8b", 4, 8192),
    Cell("llama3-8b", 4, 16384),
    Cell("llama3-8b", 4, 32768),
    Cell("llama3-8b", 4, 16384, "full"),
    Cell("llama3-8b", 4, 65536, "full"),
    Cell("llama3-8b", 4, 16384, kernel="aten-flash"),
    Cell("gpt-13b", 3, 8192),
    Cell("llama3-70b", 2, 8192),
    Cell("gpt-3b", 6, 16384),
)


@dataclass(frozen=True)
class Trained:
    """What a training took.

    Args:
        cell: which one.
        seconds: of an iteration, the median of those timed.
        peak_bytes: the most that torch's allocator handed out; ``None``: not kept.
    """

    cell: Cell
    seconds: float
    peak_bytes: int | None = None


class TrainingFailed(Exception):
    """The message is the end of what it printed."""


def job_of(cell: Cell) -> Job:
    """What the cost model is asked."""
    return Job(
        model=cell.shapes,
        seq_length=cell.tokens,
        micro_batch_size=1,
        global_batch_size=2,
        precision="bf16",
        recompute=cell.recompute,
        kernel=_KERNELS[cell.kernel],
    )


def train(cell: Cell, folder: Path) -> Trained:
    """Train a cell on the first GPU.

    Raises:
        TrainingFailed: it failed, or did not end.
    """
    job = job_of(cell)
    plan = proportional_plan(job.workload(), [[[1]]])
    write_plan(replace(plan, job=job_terms({"precision": "bf16"}, plan)), folder / "plan.yaml")
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    words = [
        *(*model_flags(job.model, cell.tokens), *PLAIN, "--bf16", "--use-distributed-optimizer"),
        *("--seq-length", cell.tokens, "--micro-batch-size", 1, "--global-batch-size", 2, "--lr", 1e-4),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--num-workers", 0, "--log-interval", 1),
        *("--train-iters", _WARM_UP + _TIMED, "--eval-iters", 0, "--eval-interval", 1000),
        *("--hexi-plan", "plan.yaml", "--hexi-kernel", cell.kernel, "--hexi-record", "record.jsonl"),
        *((*recompute, "--recompute-num-layers", 1) if cell.recompute == "full" else ()),
    ]
    run = ("-m", "torch.distributed.run", "--nproc-per-node", 1, "--master-port", free_port())
    command = [sys.executable, *map(str, (*run, "-m", "megatron_hexi.pretrain_gpt", *words))]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TrainingFailed(f"not ended after {_TIMEOUT_S} s") from None
    if done.returncode:
        raise TrainingFailed((done.stdout + done.stderr)[-3000:])
    (leg,) = read_record(folder / "record.jsonl").legs
    seconds = [one for interval in leg.intervals for one in interval.seconds]
    return Trained(cell, statistics.median(seconds[_WARM_UP:]), leg.intervals[-1].ranks.peak_bytes[0])


def table(trained: Sequence[Trained], cluster: Cluster) -> str:
    """Markdown; errors as a part of what was measured, memory without the cost model's reserve."""
    lines = [
        "| training | measured, s | predicted | | measured, GiB | predicted | |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in trained:
        job = job_of(one.cell)
        cost = CostModel(job, cluster).estimate(proportional_plan(job.workload(), [[[1]]]))
        memory = cost.ranks[0].memory
        held = (memory.total - memory.reserve) / GIB
        kept = "| | |"
        if one.peak_bytes is not None:
            peak = one.peak_bytes / GIB
            kept = f"{peak:.1f} | {held:.1f} | {held / peak - 1:+.0%} |"
        times = f"{one.seconds:.3f} | {cost.iteration_s:.3f} | {cost.iteration_s / one.seconds - 1:+.0%}"
        lines.append(f"| {one.cell.name} | {times} | {kept}")
    return "\n".join(lines)


def machine_of(gpu: str) -> Cluster:
    """A machine with one GPU of the catalogue."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.yaml"
        network = "network: {bandwidth_gb_s: 25, latency_us: 10, per: node}\n"
        path.write_text(f"name: one\nnodes: [{{name: node, gpu: {gpu}, gpus: 1}}]\n{network}")
        return read_cluster(path)


def read_runs(path: Path) -> dict[str, list[Trained]]:
    """What earlier calls measured, by the catalogue's name of the GPU."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())
    return {
        run["gpu"]: [Trained(**{**one, "cell": Cell(**one["cell"])}) for one in run["trained"]]
        for run in runs
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.
    """
    options = _parser().parse_args(words)
    with user_errors():
        if options.results:
            runs = read_runs(options.results)
        else:
            runs = {options.gpu: _measured(options.gpu, options.only, options.output)}
        for gpu, trained in runs.items():
            cluster = read_cluster(options.cluster) if options.cluster else machine_of(gpu)
            print(f"{gpu}\n\n{table(trained, cluster)}\n")
    return 0


def _measured(gpu: str, only: Sequence[int], output: Path | None) -> list[Trained]:
    """Train all cells or some; what is measured is written after each."""
    trained: list[Trained] = []
    for number, cell in enumerate(CELLS):
        if only and number not in only:
            continue
        print(f"{number + 1} of {len(CELLS)}: {cell.name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                trained.append(train(cell, Path(folder)))
            except TrainingFailed as problem:
                print(f"failed: {problem}", file=sys.stderr)
        if output:
            run = {"gpu": gpu, **_versions(), "trained": [asdict(one) for one in trained]}
            write_text_atomically(output, json.dumps([run], indent=1) + "\n")
    return trained


def _versions() -> dict[str, Any]:
    import torch  # takes seconds, which predicting need not spend

    return {
        "device": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "megatron-core")},
        "date": datetime.date.today().isoformat(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_gpu", description=__doc__)
    name = "H100-SXM-80GB"
    parser.add_argument("--gpu", default=name, help="the catalogue's name of the GPU (default %(default)s)")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="predict by what hexi probe measured")
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="N", help="cells, counted from 0")
    parser.add_argument("--output", "-o", type=Path, metavar="OUT.json", help="write what is measured")
    parser.add_argument("--results", type=Path, metavar="IN.json", help="measured earlier: predict anew")
    return parser


if __name__ == "__main__":
    sys.exit(main())
