"""Four ranks on one GPU, through gloo and the host, train as one rank does. Correctness only.

NCCL refuses two ranks on one card; gloo does not, and the code above the wire is the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hexi.plan import write_plan
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_uneven_training import MODEL, THREE_AND_ONE

# Megatron's defaults that need apex or Transformer Engine, which a GPU machine may lack.
PLAIN = (
    *("--transformer-impl", "local", "--no-rope-fusion", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--distributed-backend", "gloo"),
)


def train_on_one_card(folder: Path, ranks: int, port: int, *args: str) -> list[dict[str, float]]:
    """Start the ranks by hand: torchrun would give each its own card."""
    metrics = folder / f"metrics-{port}.jsonl"
    command = [sys.executable, "-m", "megatron_hexi.pretrain_gpt", *MODEL, *PLAIN, *args]
    command += ["--hexi-platform", "cuda", "--hexi-metrics", str(metrics)]
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "bound"),
    # bf16: the bound is the rounding of the weights' gradients, about 2^-8 on sums of many.
    [((), 1e-5), (("--bf16",), 2e-2)],
    ids=["fp32-math", "bf16-flash"],
)
def test_four_ranks_on_one_gpu_train_as_one_rank(tmp_path, precision, bound):
    write_plan(THREE_AND_ONE, tmp_path / "plan.yaml")
    save = ("--save", str(tmp_path / "weights"), "--save-interval", "1", "--train-iters", "1")
    train_on_one_card(tmp_path, 1, 29511, *save)
    args = (*precision, "--load", str(tmp_path / "weights"), "--finetune", "--train-iters", "6")
    alone = train_on_one_card(tmp_path, 1, 29512, *args)
    together = train_on_one_card(tmp_path, 4, 29513, *args, "--hexi-plan", str(tmp_path / "plan.yaml"))
    assert len(together) == len(alone) == 6
    for key in ("loss", "grad_norm"):
        for found, true in zip(together, alone, strict=True):
            assert abs(found[key] - true[key]) / true[key] < bound, key
