"""The longest sequence that fits: in a layout, to the last step; and in any layout that is found."""

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hexi.cost import estimate
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job, read_model
from megatron_hexi.models.documents import Documents
from megatron_hexi.plan import validate_plan
from megatron_hexi.planner import find_plan, longest_in_layout, longest_request
from megatron_hexi.planner.longest import STEP, lengthened
from megatron_hexi.planner.request import Request
from tests.support.fleets import read_text

MIXED = read_text("""
name: mixed
nodes:
- {name: fast, gpu: H100-SXM-80GB, gpus: 4}
- {name: slow, gpu: L40S-48GB, gpus: 4}
network: {bandwidth_gb_s: 25, latency_us: 10, per: gpu}
""")
JOB = Job(model=read_model("gpt-7b"), seq_length=16384, global_batch_size=4)


@functools.cache
def planned():
    return find_plan(Request(JOB), MIXED)


def test_one_step_more_than_the_longest_sequence_does_not_fit():
    found = planned()
    longest = longest_in_layout(found.plan, found.job, MIXED)
    assert longest >= JOB.seq_length
    for length, fits in ((longest, True), (longest + STEP, False)):
        job = dataclasses.replace(found.job, seq_length=length)
        assert estimate(lengthened(found.plan, length), job, MIXED).fits is fits


@settings(max_examples=20)
@given(st.integers(1, 10**6))
def test_members_keep_their_parts_of_a_sequence_of_any_length(length):
    plan = planned().plan
    longer = lengthened(plan, length)
    validate_plan(longer)
    for old, new in zip(plan.members, longer.members, strict=True):
        assert new.tokens / length == pytest.approx(old.tokens / JOB.seq_length, abs=2 / length)


def test_a_plan_is_found_for_a_sequence_that_the_first_layout_cannot_hold():
    found = planned()
    longer = longest_request(Request(JOB), MIXED, lambda *_: None)
    assert longer.job.seq_length > longest_in_layout(found.plan, found.job, MIXED)
    last = find_plan(longer, MIXED)
    assert last.cost.fits
    assert last.plan.workload.seq_length == longer.job.seq_length


def test_documents_have_lengths_of_their_own():
    packed = dataclasses.replace(JOB, documents=Documents((1024, 2048), (1.0, 1.0)))
    with pytest.raises(HexiError, match="leave --document-lengths out"):
        longest_request(Request(packed), MIXED, lambda *_: None)
