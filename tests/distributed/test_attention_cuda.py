"""Attention of any plan on a GPU: its kernels and Triton's copies and sums. Ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan import Mask
from megatron_hexi.runtime.attention import _DomainAttentionFunction
from megatron_hexi.runtime.passes import AttentionLayer, Inputs
from tests.distributed.test_attention_threads import NAMES, SEEDS
from tests.support.fake_cuda import Context
from tests.support.kernels import BY_NAME, ON_CUDA
from tests.support.plans import examples, masks, plans, workloads
from tests.support.reference import plain_results, planned_results, random_problem, rms_error

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
LARGE = workloads(lengths=[97, 128, 150, 199, 512], head_dims=(64, 128))


class _OnGpu(torch.autograd.Function):
    """Both passes of tensors on the host, carried out on the GPU.

    Autograd has one thread for all backward passes of a device, in which ranks would wait for each other;
    what is on the host is differentiated in the thread of its rank.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, sinks: Any, layer: AttentionLayer) -> Any:
        ctx.of_layer = Context()
        query, key, value = (tensor.to(GPU) for tensor in (query, key, value))
        sinks = None if sinks is None else sinks.to(GPU)
        return _DomainAttentionFunction.forward(ctx.of_layer, query, key, value, sinks, None, layer).cpu()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = _DomainAttentionFunction.backward(ctx.of_layer, *(grad.to(GPU) for grad in grads))
        *of_inputs, _, nothing = found
        return *(None if grad is None else grad.cpu() for grad in of_inputs), nothing


def results_on_gpu(plan, problem, name="auto"):
    def layer(attention, query, key, value, scale, sinks=None):
        schedule = attention.schedules(problem.mask)
        there = query[:0].to(GPU)
        kernel = attention.kernel(there.device, there.dtype, there.shape[-1])
        groups = attention.domain_group, attention.a2a_group
        inputs = Inputs.from_tensors(query, key, value, sinks)._replace(device=there.device)
        way = AttentionLayer(schedule, kernel, scale, *groups, plan.exchange.window, inputs)
        return _OnGpu.apply(query, key, value, sinks, way)

    return planned_results(plan, problem, name, layer)


@st.composite
def masked_plans(draw):
    plan = draw(plans(LARGE))
    return plan, draw(st.just(Mask(plan.workload.causal)) | masks(plan.workload))


@pytest.mark.parametrize("name", ["auto", *ON_CUDA])
@given(
    case=masked_plans(),
    dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16]),
    batch=st.integers(1, 2),
    has_sinks=st.booleans(),
    seed=SEEDS,
)
@examples(15)
def test_any_plan_is_at_most_twice_as_far_from_the_truth_as_plain_attention(
    name, case, dtype, batch, has_sinks, seed
):
    plan, mask = case
    if name != "auto":
        refusal = BY_NAME[name].refuses(GPU, dtype, plan.workload.head_dim)
        if refusal:
            pytest.skip(f"{name}: {refusal}")
    problem = random_problem(plan.workload, batch, dtype, seed=seed, mask=mask, has_sinks=has_sinks)
    plain, truth = plain_results(problem), plain_results(problem.to(torch.float64))
    for what, mine, theirs, exact in zip(
        NAMES, results_on_gpu(plan, problem, name), plain, truth, strict=False
    ):
        # Rows that see one key have no error when written out; what is given to attention is of order 1.
        assert rms_error(mine, exact) <= 2 * rms_error(theirs, exact) + torch.finfo(dtype).eps / 4, what


@given(case=masked_plans(), has_sinks=st.booleans(), seed=SEEDS)
@examples(10)
def test_any_plan_in_fp32_is_attention(case, has_sinks, seed):
    plan, mask = case
    problem = random_problem(plan.workload, 1, torch.float32, seed=seed, mask=mask, has_sinks=has_sinks)
    truth = plain_results(problem.to(torch.float64))
    for what, found, exact in zip(NAMES, results_on_gpu(plan, problem), truth, strict=False):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=2e-5, msg=what)
