"""What `hexi plan` prints is typed into a shell, and trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hexi.lab.testbed.job import free_port
from tests.megatron.forked import Forks
from tests.megatron.launch import REPOSITORY

CLUSTER = """\
name: two
nodes:
- {name: localhost, gpu: H100-SXM-80GB, gpus: 2}
- {name: slow, gpu: A100-SXM-80GB, gpus: 1}
network: {bandwidth_gb_s: 25}
"""
MODEL = """\
--num-layers 6 --hidden-size 64 --num-attention-heads 4 --vocab-size 127
--position-embedding-type rope --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0
"""
EXPERTS = """\
--num-experts 6 --moe-ffn-hidden-size 48 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --disable-bias-linear
"""
JOB = ("--model", "tiny.args", "--seq-length", "251", "--global-batch-size", "4", "--precision", "fp32")
OWN = (
    "--hexi-platform",
    "cpu",
    "--num-workers",
    "0",
    "--train-iters",
    "2",
    "--hexi-metrics",
    "metrics.jsonl",
)


ALONE = ("--data-parallel-size", "1", "--pipeline-model-parallel-size", "1")


@pytest.mark.parametrize(
    ("model", "layout", "agents"),
    [
        (MODEL, (*ALONE, "--tensor-model-parallel-size", "1"), 1),
        pytest.param(
            MODEL,
            ("--data-parallel-size", "1", "--pipeline-model-parallel-size", "3"),
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MODEL + EXPERTS,
            (*ALONE, "--tensor-model-parallel-size", "1", "--expert-model-parallel-size", "2"),
            1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["on-one-node", "on-both-nodes", "with-experts"],
)
def test_lines_train(model, layout, agents, forks, tmp_path):
    def hexi(*words: str) -> str:
        return _hexi(forks, tmp_path, *words)

    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "tiny.args").write_text(model)
    hexi("plan", "cluster.yaml", *JOB, *layout, "-o", "plan.yaml")
    assert ("experts: [" in (tmp_path / "plan.yaml").read_text()) == ("--num-experts" in model)
    lines = json.loads(hexi("launch", "plan.yaml", "--cluster", "cluster.yaml", "--json", "--", *OWN))
    text = hexi("launch", "plan.yaml", "--cluster", "cluster.yaml", "--", *OWN)
    typed = text.split("# or with Slurm")[0]
    assert len(lines["torchrun"]) == agents
    for start in lines["torchrun"]:
        assert start["line"] in typed
        # What is typed on each node by itself is started here side by side.
        typed = typed.replace(f"{start['line']}  # {start['node']}", f"{start['line']} & jobs+=($!)")
    typed = typed.replace("--master-port=29500", f"--master-port={free_port()}")
    script = f'set -eu\njobs=()\n{typed}\nfor job in "${{jobs[@]}}"; do wait "$job"; done\n'
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=_environment() | {"PYTHON_EXEC": str(forks.python)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, [line for line in ran.stderr.splitlines() if "rror" in line][:5]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2


def _hexi(forks: Forks, folder: Path, *words: str) -> str:
    ran = subprocess.run(
        [forks.python, "-m", "megatron_hexi.cli.main", *words],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _environment() -> dict[str, str]:
    """With torchrun where the interpreter is, and its ranks, which are forked, on one core each."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
