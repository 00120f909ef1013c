"""Samples one ahead: in order, each once, with what fetching raised at its turn; tables ready in time."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch

from megatron_hexi.megatron import documents_ahead
from megatron_hexi.megatron.documents_ahead import DocumentsAhead, Prefetched, documents_of
from megatron_hexi.plan import Mask, Schedules, Workload, proportional_plan, schedule

PLAN = proportional_plan(Workload(64, 4, 2, 8), [[[1.0, 1.0], [1.0, 1.0]]])


def sample(*lengths: int) -> dict[str, torch.Tensor]:
    """As Megatron's data sets give it: ends padded with the sequence's length, behind a batch's dimension."""
    ends = torch.cumsum(torch.tensor([0, *lengths]), 0)
    padding = torch.full((65 - len(ends),), 64)
    return {"cu_seqlens": torch.cat([ends, padding]).to(torch.int32).unsqueeze(0)}


def test_documents_are_read_from_padded_ends():
    assert documents_of(sample(10, 0, 54), 64) == (10, 0, 54)
    assert documents_of(sample(64), 64) == (64,)
    assert documents_of({"cu_seqlens": None}, 64) is None
    assert documents_of(sample(10, 20), 30) == (10, 20)
    assert documents_of(sample(10, 21), 30) is None  # of another sequence
    two = {"cu_seqlens": torch.cat([sample(10, 54)["cu_seqlens"]] * 2)}
    assert documents_of(two, 64) is None


def test_samples_come_in_order_and_an_error_at_its_turn():
    def samples():
        yield from (1, 2)
        raise ValueError("unreadable")

    ahead = Prefetched(samples())
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ValueError, match="unreadable"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_ends_of_another_sample_are_not_taken_for_those_of_the_last():
    ahead = DocumentsAhead()
    ahead.take(sample(10, 54), 64)
    assert ahead.of(torch.tensor([0, 10, 64], dtype=torch.int32)) == (10, 54)
    assert ahead.of(torch.tensor([[0, 10, 64]])) == (10, 54)
    assert ahead.of(torch.tensor([0, 11, 64], dtype=torch.int32)) is None
    assert ahead.of(torch.tensor([0, 10, 20, 64], dtype=torch.int32)) is None


def test_the_tables_of_the_next_sample_are_derived_by_another_thread_and_once():
    schedules = Schedules(PLAN.workload, PLAN.replicas[0].domain, 0, 1)
    session = mock.Mock(seq_length=64)
    session.attention.schedules = schedules
    builders = []
    built = schedule.build_schedule

    def build(*args, **kwargs):
        builders.append(threading.current_thread())
        return built(*args, **kwargs)

    with mock.patch.object(schedule, "build_schedule", build):
        schedules = session.attention.schedules = Schedules(PLAN.workload, PLAN.replicas[0].domain, 0, 1)
        for window in (None, 5):
            schedules(Mask(window=window, documents=(64,)))
        builders.clear()
        ahead = documents_ahead.DocumentsAhead()
        ahead.prepare(session, sample(30, 34))
        ahead.wait(session, (30, 34))
        for window in (None, 5):
            schedules(Mask(window=window, documents=(30, 34)))
    assert len(builders) == 2
    assert threading.main_thread() not in builders
