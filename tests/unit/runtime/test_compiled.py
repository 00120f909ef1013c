"""Phases of attention have names in a profile, and cost nothing where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_hexi.plan import Exchange, Mask, Workload, proportional_plan
from megatron_hexi.plan.program import attention_program
from megatron_hexi.runtime import compiled
from tests.support.training import Job

PHASES: tuple[tuple[Any, list[Any]], ...] = tuple(
    (operation, []) for operation in attention_program(True, (2, 1), 1, 2, 0)
)


def job(parts):
    plan = proportional_plan(Workload(32, 4, 4, 2), [[[1.0, 1.0], [1.0, 1.0]]])
    return Job(
        replace(plan, exchange=Exchange(1, parts)),
        (Mask(causal=True),),
        1,
        1,
        (1,),
        "no",
        False,
        torch.float32,
    )


def names(events):
    return {event.name.removeprefix("hexi: ") for event in events if event.name.startswith("hexi: ")}


def test_a_profile_shows_every_phase():
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        job(2).post()
    found = names(profiled.events())
    assert {
        "post all-to-all in, half 0",
        "post all-to-all in, half 1",
        "wait for all-to-all in, half 0",
        "wait for all-to-all in, half 1",
        "own block, half 0",
        "own block, half 1",
        "post keys of step 0, part 1",
        "wait for keys of step 0, part 1",
        "blocks of step 0, part 1",
        "post gradients of step 0, part 0",
        "wait for gradients of step 0, part 0",
        "post all-to-all out, half 0",
        "wait for all-to-all out, half 0",
        "wait for all-to-all out, half 1",
    } <= found


def test_without_a_profile_nothing_is_recorded():
    with mock.patch.object(compiled, "record_function", side_effect=AssertionError):
        job(1).post()
    assert compiled.named(PHASES) is PHASES


def test_a_profile_changes_nothing_of_the_program():
    with profile(activities=[ProfilerActivity.CPU]):
        assert tuple(compiled.named(PHASES)) == PHASES


def fail_in_a_pass():
    for _ in compiled.named(PHASES):
        raise ValueError("broken")


def test_a_range_ends_where_a_pass_fails():
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with pytest.raises(ValueError, match="broken"):
            fail_in_a_pass()
        with torch.profiler.record_function("after"):
            pass
    (after,) = (event for event in profiled.events() if event.name == "after")
    assert after.cpu_parent is None or not after.cpu_parent.name.startswith("hexi: ")


@pytest.mark.gpu
def test_under_emit_nvtx_names_are_asked_for():
    with torch.autograd.profiler.emit_nvtx():
        assert compiled.named(PHASES) is not PHASES
    assert compiled.named(PHASES) is PHASES
