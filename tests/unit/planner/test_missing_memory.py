"""The error where nothing fits names the memory that is missing, and nodes that would hold the sum."""

from dataclasses import replace

import pytest

from megatron_hexi.cost.memory import GIB, RESERVE_BYTES
from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request
from megatron_hexi.planner.advice import nothing_fits
from megatron_hexi.planner.bound import missing_memory
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import read_text

TWO_KINDS = """\
name: two-kinds
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 8}
- {name: l40s, gpu: L40S-48GB, gpus: 4}
network: {gbit_s: 400, per: gpu}
"""


def large(**terms):
    return Request(Job(model=read_model("llama3-70b"), seq_length=2**17, **terms))


def test_the_sum_is_that_of_all_weights_and_of_one_sequence():
    known, request = read_text(TWO_KINDS), large()
    found = missing_memory(request, known)
    # bf16 weights, fp32 gradients, two moments and masters: 18 bytes of each of the 70.6 billion weights.
    assert found.static == pytest.approx(18 * request.job.model.total_params / GIB)
    # The input of each of 80 layers of 8192 in two bytes, and what one layer and the loss need besides.
    inputs = 80 * 2**17 * 8192 * 2 / GIB
    assert inputs < found.sequence < 2 * inputs
    usable = sum(rank.device.usable_gib - RESERVE_BYTES / GIB for rank in known.ranks)
    assert found.there == pytest.approx(usable)
    assert found.gib == pytest.approx(found.static + found.sequence - usable)


def test_as_many_nodes_as_it_says_hold_the_sum_and_one_fewer_do_not():
    known = read_text(TWO_KINDS)
    counts = missing_memory(large(), known).counts
    assert list(counts) == ["h100", "l40s"]
    for name, count in counts.items():
        assert missing_memory(large(), known.with_nodes(name, count)).gib <= 0
        assert missing_memory(large(), known.with_nodes(name, count - 1)).gib > 0
    assert missing_memory(large(), known.with_nodes("h100", 8)).counts == {}


def test_a_fixed_recomputation_counts():
    plain = Request(replace(large().job, recompute="none"), frozenset(["recompute"]))
    known = read_text(TWO_KINDS)
    assert missing_memory(plain, known).sequence > 2 * missing_memory(large(), known).sequence


def test_the_error_says_both_unless_more_nodes_were_found_to_do():
    known, request = read_text(TWO_KINDS), large()
    error = nothing_fits(request, known, lambda *_: None, proven=False)
    counts = missing_memory(request, known).counts
    assert error.details["node_counts"] == counts
    assert f"without offload {error.details['missing_gib']:,.0f} GiB are missing" in str(error)
    assert f"by that sum it takes nodes h100 with count: {counts['h100']} in the cluster file, or " in str(
        error
    )
    enough = type("Found", (), {"tokens_per_s": 7.0})()
    found = nothing_fits(request, known, lambda *_: enough, proven=False)
    assert any(one["change"].startswith("nodes ") for one in found.details["fits"])
    assert "by that sum" not in str(found)


def test_where_the_sum_would_do_nothing_is_said_to_be_missing():
    error = nothing_fits(Request(tiny_job()), cluster([("a", "PLAIN", 8)]), lambda *_: None, proven=False)
    assert error.details["missing_gib"] == 0
    assert "missing" not in str(error)
