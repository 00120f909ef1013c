"""The lines printed for fifty files of arguments start, on gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.megatron.argument_files import FILES
from tests.megatron.forked import Forks
from tests.support.shell import call_hexi

CLUSTER = """\
name: two
nodes:
- {name: fast, gpu: H100-SXM-80GB, gpus: 1}
- {name: slow, gpu: A100-SXM-80GB, gpus: 1}
network: {bandwidth_gb_s: 25}
"""
#: An array, samples and gates; plain lines and fp16. The others repeat them.
FAST = ("gated-attention-by-llama3", "gpt3-by-functional-test")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FILES]
)
def test_printed_lines_start(name: str, forks: Forks, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(CLUSTER)
    Path("job.args").write_text(FILES[name])
    # Two ranks, by two stages or by two replicas: a job as small as this one gains little by a second GPU.
    replicas = 1 if "--pipeline-model-parallel-size 2" in FILES[name] else 2
    words = ["plan", "cluster.yaml", "--model", "job.args", "-o", "plan.yaml", "--json"]
    done = call_hexi(monkeypatch, capsys, [*words, "--data-parallel-size", replicas])
    assert done.code == 0, done.err
    flags = json.loads(done.out)["launch"]["flags"]
    own = ("--num-workers", "0", "--distributed-backend", "gloo")
    log = forks.train(tmp_path, ranks=2, args=[*flags, *own])
    stated = "--train-iters 3" in FILES[name] or "--train-samples 12" in FILES[name]
    assert len(log.losses) == (3 if stated else 10)
