"""Fixtures that the tests of planning commands share."""

from pathlib import Path

import pytest

from megatron_hexi import planner
from megatron_hexi.cost import CostModel
from megatron_hexi.planner.joint import Candidate
from tests.support.planned import baseline, make_planned
from tests.support.shell import call_hexi

CLUSTER = """\
name: small
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 4}
- {name: a100, gpu: A100-SXM-80GB, gpus: 4}
network: {bandwidth_gb_s: 25}
"""

JOB = ("--model", "gpt-3b", "--seq-length", 16384, "--recompute-granularity", "full")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a cluster file."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(CLUSTER)
    return tmp_path


@pytest.fixture
def hexi(folder, monkeypatch, capsys):
    """Calls ``hexi WORDS…`` in that folder."""
    return lambda *words: call_hexi(monkeypatch, capsys, words)


@pytest.fixture
def asked(monkeypatch):
    """Puts a planner without a search in place; what it was asked."""
    calls = []

    def find_plan(request, cluster, *, with_baselines, simpler_within, progress, tried):
        calls.append((request, with_baselines, progress, simpler_within))
        baselines = [baseline("ring", 1000.0), baseline("ulysses", why_not="no")] if with_baselines else []
        planned = make_planned(
            request.job, cluster, [[[3] * 4, [1] * 4]], baselines=baselines, notes=["it was made up"]
        )
        if tried is not None:
            timing = CostModel(planned.job, cluster).timing(planned.plan)
            tried("a step", Candidate(planned.plan, planned.job, timing))
        return planned

    monkeypatch.setattr(planner, "find_plan", find_plan)
    return calls


ARGUMENTS = """\
--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000   # a model,
--position-embedding-type rope
--seq-length 4096 --micro-batch-size 2 --global-batch-size 4 --bf16 --recompute-activations   # a job,
--lr 1e-3 --train-iters 5                                                    # and more
"""
