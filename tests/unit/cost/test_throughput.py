"""Tokens/s of a GPU, model TFLOP/s and MFU: by hand, and wherever tokens/s stand."""

import pytest

from megatron_hexi.cluster import device
from megatron_hexi.cost import Throughput, estimate, model_flops
from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.report.estimate import estimate_dict, spell_throughput, throughput_cells
from megatron_hexi.report.planned import planned_dict
from tests.support.costs import cluster, tiny_job

FACTS = ("tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu")


def test_it_is_what_one_reckons_by_hand():
    # Of a layer queries and outputs, keys and values, and the MLP; and the loss.
    model = read_model("llama3-70b")
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    weights = 80 * layer + 8192 * 128256
    flops = 6 * weights + 6 * 131072 * 80 * 8192
    assert model_flops(model, 131072) == flops
    gpus = [device("H100-SXM-80GB")] * 48
    found = Throughput.of(Job(model, 131072), gpus, 20701.0)
    assert found.tokens_per_s_per_gpu == pytest.approx(20701 / 48)
    assert found.model_tflops_per_gpu == pytest.approx(20701 / 48 * flops / 1e12)
    assert gpus[0].nominal.bf16 == 989
    assert found.mfu == pytest.approx(20701 * flops / (48 * 989e12))
    assert found.at(2 * 20701.0).mfu == pytest.approx(2 * 20701 * flops / (48 * 989e12))


def test_mixed_gpus_count_with_their_own_rates_and_unknown_ones_leave_mfu_out():
    job = Job(read_model("gpt-7b"), 16384)
    mixed = Throughput.of(job, [device("H100-SXM-80GB"), device("A100-SXM-80GB")], 1000.0)
    assert mixed.peak_tflops == 989 + 312
    assert mixed.mfu == pytest.approx(1000 * mixed.flops_per_token / 1e12 / (989 + 312))
    old = Throughput.of(job, [device("H100-SXM-80GB"), device("V100-SXM2-16GB")], 1000.0)
    assert old.mfu is None
    assert "MFU" not in spell_throughput(old)
    assert throughput_cells(old)[-1] == throughput_cells(None)[-1] == "-"


def test_they_stand_beside_tokens_per_s():
    known, job = cluster([("a", "PLAIN", 2)]), tiny_job()
    planned = find_plan(Request(job), known)
    cost = estimate(planned.plan, planned.job, known)
    assert cost.throughput.tokens_per_s == cost.tokens_per_s
    assert cost.throughput.gpus == len(cost.ranks)
    for document in (planned_dict(planned, known), estimate_dict(cost, planned.job)):
        assert {name: document[name] for name in FACTS} == cost.throughput.facts
