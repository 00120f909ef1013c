"""Latent columns that travel in place of keys and values give what one device gives, with all gradients."""

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hexi.errors import PlanError
from megatron_hexi.plan import LatentColumns, Mask, build_schedule
from megatron_hexi.runtime import latent
from tests.support.plans import RAGGED, RANDOMS, SPARSE, TORN, examples, masks, plans, workloads
from tests.support.reference import plain_attention, positions_of
from tests.support.threads import run_ranks

NAMES = ("output", "query", "columns", "rotary", "sinks", "matrix")
SEEDS = st.integers(0, 2**24 - 1)
BATCH = 2


@st.composite
def latent_plans(draw):
    """Any plan of a model whose heads are made of latent columns, which travel; with any mask."""
    random = draw(RANDOMS)
    workload = draw(workloads(head_dims=(3, 8), value_dims=(2, 9)))
    plan = draw(plans(st.just(_latent(workload, random.choice([1, 4, 20]), random.choice([1, 2])))))
    return plan, draw(masks(plan.workload))


def _latent(workload, kv_rank=5, rotary_dim=1):
    columns = LatentColumns(kv_rank, rotary_dim)
    return dataclasses.replace(
        workload, kv_heads=workload.heads, value_dim=workload.value_dim or 4, latent_exchange=columns
    )


def _of_latent(plan):
    return dataclasses.replace(plan, workload=_latent(plan.workload))


def random_tensors(workload, seed):
    """Query, columns, rotary columns, sinks, matrix, and the gradient of the output, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    heads, length = workload.local_heads, workload.seq_length
    (rank, rotary), value = workload.exchanged_sizes, workload.value_size
    shapes = [
        (length, BATCH, heads, workload.head_dim),
        (length, BATCH, 1, rank),
        (length, BATCH, 1, rotary),
        (heads,),
        (heads * (workload.head_dim - rotary + value), rank),
        (length, BATCH, heads, value),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def expanded(query, columns, rotary, sinks, matrix, *, mask, scale):
    """Attention of keys and values that are written out for all heads, differentiable."""
    heads = query.shape[2]
    both = torch.einsum("sbc,hnc->sbhn", columns.squeeze(2), matrix.unflatten(0, (heads, -1)))
    plain = query.shape[3] - rotary.shape[3]
    key = torch.cat([both[..., :plain], rotary.expand(-1, -1, heads, -1)], dim=3)
    return plain_attention(query, key, both[..., plain:], sinks, mask=mask, scale=scale)


def plain_results(tensors, mask, scale):
    *inputs, grad = (tensor.clone().requires_grad_() for tensor in tensors)
    output = expanded(*inputs, mask=mask, scale=scale)
    return output.detach(), *torch.autograd.grad(output, inputs, grad)


def planned_results(plan, tensors, mask, scale):
    """Return output and gradients by threads, a rank each; those of sinks and matrix are sums over ranks."""
    domain = plan.replicas[0].domain
    places = [
        positions_of(build_schedule(plan.workload, domain, index, plan.exchange.parts, mask).segments)
        for index in range(len(domain.members))
    ]
    *inputs, grad = tensors

    def work(rank):
        mine = places[rank.rank]
        own = [tensor[mine].clone().requires_grad_() for tensor in inputs[:3]]
        own += [tensor.clone().requires_grad_() for tensor in inputs[3:]]
        query, columns, rotary, sinks, matrix = own
        attention = rank.attention(plan)
        output = attention(query, columns, rotary, scale, mask, sinks, matrix=matrix)
        output.backward(grad[mine])
        return output.detach(), *(tensor.grad for tensor in own)

    parts = run_ranks(len(domain.members), work)
    whole = []
    for number, like in enumerate((grad, *inputs[:3])):
        tensor = torch.full_like(like, math.nan)
        for mine, part in zip(places, parts, strict=True):
            tensor[mine] = part[number]
        whole.append(tensor)
    return *whole, *(sum(part[number] for part in parts) for number in (4, 5))


def assert_equal(results, expected):
    for name, result, truth in zip(NAMES, results, expected, strict=True):
        say = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(result, truth, atol=1e-10, rtol=1e-10, msg=say)


@given(case=latent_plans(), seed=SEEDS)
@example(case=(_of_latent(TORN), Mask()), seed=0)
@example(case=(_of_latent(SPARSE), Mask(causal=SPARSE.workload.causal)), seed=0)
@example(case=(_of_latent(RAGGED), Mask(window=7, documents=(20, 1, 0, 20))), seed=0)
@examples(60)
def test_any_plan_gives_the_output_and_the_gradients_of_one_device(case, seed):
    plan, mask = case
    tensors, scale = random_tensors(plan.workload, seed), 0.3
    assert_equal(planned_results(plan, tensors, mask, scale), plain_results(tensors, mask, scale))


@pytest.mark.parametrize("lost", ["a step", "positions"])
def test_a_part_of_a_gradient_that_is_lost_is_seen(lost, monkeypatch):
    contracted, calls = latent._contracted, []

    def faulty(sizes, columns, key, value, matrix, total):
        calls.append(key)
        if lost == "a step" and len(calls) == 2:
            total = total.clone()
        found = contracted(sizes, columns, key, value, matrix, total)
        return [found[0], 0 * found[1]] if lost == "positions" else found

    monkeypatch.setattr(latent, "_contracted", faulty)
    plan = _of_latent(RAGGED)
    tensors = random_tensors(plan.workload, 0)
    mask = Mask(causal=plan.workload.causal)
    with pytest.raises(AssertionError, match="matrix" if lost == "a step" else "rotary"):
        assert_equal(planned_results(plan, tensors, mask, 0.3), plain_results(tensors, mask, 0.3))


def test_other_columns_than_those_of_the_plan_are_refused():
    plan = _of_latent(TORN)
    tensors = random_tensors(plan.workload, 0)
    tensors[1] = tensors[1][..., :-1]
    tensors[4] = tensors[4][:, :-1]
    with pytest.raises(PlanError, match="latent columns has the shape"):
        planned_results(plan, tensors, Mask(causal=plan.workload.causal), 0.3)
