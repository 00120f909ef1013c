"""Compiled attention layers: few Python calls, bounded in number, none of another mask or plan."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

import megatron_hexi
from megatron_hexi.plan import Exchange, Mask, Schedules, Workload, proportional_plan
from megatron_hexi.runtime import attention as attention_room
from tests.support.plans import RAGGED
from tests.support.reference import plain_results, planned_results, positions_of, random_problem
from tests.support.threads import run_ranks

_PACKAGE = megatron_hexi.__path__[0]


def python_calls(run):
    """How many functions of the package are called, by name."""
    calls: Counter[str] = Counter()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, calls


@pytest.mark.parametrize(
    ("groups", "parts", "forward", "backward"),
    [(2, 1, 52, 73), (4, 2, 133, 182)],
    ids=["two", "four in parts"],
)
def test_a_layer_takes_about_as_many_python_calls_as_launches(groups, parts, forward, backward):
    """Groups of two, once the layer is compiled: no look-up, no counting and no slicing is left."""
    plan = proportional_plan(Workload(256, 4, 4, 8), [[[1, 1]] * groups])
    plan = replace(plan, exchange=Exchange(1, parts))
    problem = random_problem(plan.workload, 1, torch.float32)

    def work(rank):
        attention = rank.attention(plan)
        mine = positions_of(attention.schedules().segments)
        for _ in range(2):
            tensors = [t[mine].requires_grad_() for t in (problem.query, problem.key, problem.value)]
            output, there = python_calls(lambda tensors=tensors: attention(*tensors))
            gradient = problem.grad_output[mine]
            _, back = python_calls(lambda output=output, gradient=gradient: output.backward(gradient))
        return there, back

    for there, back in run_ranks(plan.units, work):
        assert there.total() <= forward, there
        assert back.total() <= backward, back


def test_layers_of_many_masks_are_forgotten_but_not_those_under_way(monkeypatch):
    """Documents are others in each sequence; a backward pass uses what its forward pass used."""
    monkeypatch.setattr(attention_room, "_KEPT", 2)
    length = RAGGED.workload.seq_length
    masks = [Mask(documents=(first, length - first)) for first in (1, 9, 17, 23)]
    problems = [random_problem(RAGGED.workload, 1, mask=mask) for mask in masks]
    domain = RAGGED.replicas[0].domain

    def work(rank):
        attention = rank.attention(RAGGED)
        under_way = []
        for problem in problems:
            mine = positions_of(attention.schedules(problem.mask).segments)
            tensors = [t[mine].requires_grad_() for t in (problem.query, problem.key, problem.value)]
            output = attention(*tensors, problem.scale, problem.mask)
            under_way.append((mine, problem, tensors, output))
        assert len(attention._layers) == 2
        results = []
        for mine, problem, tensors, output in under_way:
            gradients = torch.autograd.grad(output, tensors, problem.grad_output[mine])
            results.append((mine, output.detach(), *gradients))
        return results

    ranks = run_ranks(len(domain.members), work)
    for number, problem in enumerate(problems):
        for which, exact in enumerate(plain_results(problem)):
            for mine, *found in (results[number] for results in ranks):
                torch.testing.assert_close(found[which], exact[mine], atol=1e-10, rtol=1e-10)


def test_a_swapped_plan_compiles_its_own_layers():
    """The same groups with other shares, swapped between a forward and its backward pass."""
    workload = Workload(32, 4, 2, 8)
    plans = [proportional_plan(workload, [[speeds, [1.0, 1.0]]]) for speeds in ([1.0, 1.0], [3.0, 1.0])]
    problem = random_problem(workload, 1)
    exact = plain_results(problem)

    def work(rank):
        attention = rank.attention(plans[0])
        passes = []
        for plan in plans:
            schedules = Schedules(workload, plan.replicas[0].domain, rank.rank, plan.exchange.parts)
            attention = replace(attention, schedules=schedules, window=plan.exchange.window)
            assert not attention._layers
            mine = positions_of(schedules().segments)
            tensors = [t[mine].requires_grad_() for t in (problem.query, problem.key, problem.value)]
            passes.append((mine, tensors, attention(*tensors, problem.scale)))
        for mine, tensors, output in reversed(passes):
            found = output, *torch.autograd.grad(output, tensors, problem.grad_output[mine])
            for one, truth in zip(found, exact, strict=True):
                torch.testing.assert_close(one, truth[mine], atol=1e-10, rtol=1e-10)
        return len(passes[0][0]), len(passes[1][0])

    assert any(before != after for before, after in run_ranks(4, work))


@pytest.mark.parametrize("groups", [[[1, 1], [2, 1]], [[1], [3]]], ids=["groups", "ranks that are alone"])
def test_padding_rows_are_not_read_and_have_zeros(groups):
    plan = proportional_plan(Workload(24, 4, 2, 8), [groups])
    problem = random_problem(plan.workload, 2)

    def padded(attention, query, key, value, scale):
        rows = [
            torch.full((3, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype).requires_grad_()
            for tensor in (query, key, value)
        ]
        tensors = [torch.cat(pair) for pair in zip((query, key, value), rows, strict=True)]
        output = attention(*tensors, scale, padding=3)
        assert torch.equal(output[-3:], torch.zeros_like(output[-3:]))
        for tensor in tensors:
            tensor.register_hook(lambda grad: check_zeros(grad[-3:]))
        return output[:-3]

    def check_zeros(rows):
        assert torch.equal(rows, torch.zeros_like(rows))

    results = planned_results(plan, problem, layer=padded)
    for found, exact in zip(results, plain_results(problem), strict=True):
        torch.testing.assert_close(found, exact, atol=1e-10, rtol=1e-10)
