"""Training in a subprocess, as a user starts it: torchrun, one process a rank, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

#: A model that trains in milliseconds an iteration, on Megatron's mock data, without dropout.
TINY_GPT = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--position-embedding-type", "rope"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-3"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--num-workers", "0"),
    *("--train-iters", "4", "--eval-interval", "100", "--eval-iters", "0"),
)


@dataclass(frozen=True)
class TrainingLog:
    """What a training run gave, one entry an iteration, at full precision.

    Attributes:
        iterations: their numbers, from 1 (or from where a checkpoint left off).
        losses: mean over the tokens of the batch.
        grad_norms: before clipping; ``None`` where the step was skipped.
        output: everything that the ranks printed.
        skipped: whether the step was.
        loss_scales: after the step.
    """

    iterations: list[int]
    losses: list[float]
    grad_norms: list[float]
    output: str
    skipped: list[bool]
    loss_scales: list[float]


def train(
    tmp_path: Path,
    *,
    ranks: int,
    args: Sequence[str | Path],
    plan: Path | None = None,
    entry: str | Sequence[str] = "megatron_hexi.pretrain_gpt",
    python: str | Path = sys.executable,
    rank_python: str | Path | None = None,
    timeout: float = 120.0,
) -> TrainingLog:
    """Train and read the metrics.

    Args:
        tmp_path: the working directory; each run writes its metrics in a new file there.
        ranks: processes to start.
        args: the training script's arguments.
        plan: a plan for ``--hexi-plan``.
        entry: the module to run; or what to give torchrun instead (a script, or ``-m``, a module and words of
            its own).
        python: the interpreter of torchrun, and of the ranks unless told otherwise; that of `Forks` is fast.
        rank_python: the interpreter of the ranks.
        timeout: seconds after which the run has failed.

    Raises:
        AssertionError: the run failed; the message holds the end of its output.
    """
    metrics = tmp_path / f"metrics-{len(list(tmp_path.glob('metrics-*')))}.jsonl"
    metrics.touch()
    options = {"--hexi-metrics": metrics, **({"--hexi-plan": plan} if plan else {})}
    words = [word for option in options.items() for word in option]
    result = launch(
        tmp_path,
        ranks=ranks,
        args=[*args, *words],
        entry=entry,
        python=python,
        rank_python=rank_python,
        timeout=timeout,
    )
    output = result.stdout + result.stderr
    # The first traceback is a rank's; what torchrun says comes last and does not know why.
    why = output[max(0, output.find("Traceback (most recent call last)") - 1000) :][:6000]
    assert result.returncode == 0, f"training failed with exit code {result.returncode}:\n{why}"
    return read_metrics(metrics, output)


def read_metrics(metrics: Path, output: str) -> TrainingLog:
    """What a run wrote for ``--hexi-metrics``."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return TrainingLog(
        [line["iteration"] for line in lines],
        [line["loss"] for line in lines],
        [line["grad_norm"] for line in lines],
        output,
        [bool(line["skipped"]) for line in lines],
        [line["loss_scale"] for line in lines],
    )


def launch(
    tmp_path: Path,
    *,
    ranks: int,
    args: Sequence[str | Path],
    entry: str | Sequence[str] = "megatron_hexi.pretrain_gpt",
    python: str | Path = sys.executable,
    rank_python: str | Path | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run an entry point under torchrun, and come back whether it succeeded or not."""
    program = ["-m", entry] if isinstance(entry, str) else entry
    command = [
        *(str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *(*program, *map(str, args)),
    ]
    variables = environment() | ({} if rank_python is None else {"PYTHON_EXEC": str(rank_python)})
    return subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )


def environment() -> dict[str, str]:
    """What every rank runs in: this checkout's code, one thread, no GPU."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "CUDA_VISIBLE_DEVICES": "",
    }
