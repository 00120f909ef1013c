"""The shapes that Transformer Engine tries its own context parallelism with, under uneven plans.

Facts of NVIDIA/TransformerEngine, tests/pytorch/attention/test_attention_with_cp.py (2025): batch 2, 4096
tokens; a window of 512 where there is one. Left out, as no GPT under a plan has them: biases, windows of
later keys, fp8. Always at a sixteenth of the length under one plan; at the whole length, and under others, on
request.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch

from megatron_hexi.plan import Mask, Workload, proportional_plan
from tests.support.reference import Problem, plain_results, planned_results, random_problem


@dataclass(frozen=True)
class Shape:
    """One line of the table: query heads, KV heads, head size; what else it has."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: bool = False
    sinks: str = "vanilla"
    value_dim: int | None = None


SHAPES = {
    # Of fused attention; the others are flash attention's, which fused attention repeats.
    "fused_cp_3_0": Shape(12, 12, 128, value_dim=64),
    "cp_1_0": Shape(12, 12, 128),
    "cp_1_1": Shape(12, 12, 128, causal=False),
    "cp_1_2": Shape(12, 12, 128, window=True),
    "cp_2_0": Shape(12, 2, 128),
    "cp_2_1": Shape(12, 2, 128, causal=False),
    "cp_2_2": Shape(12, 2, 128, window=True),
    "cp_3_0": Shape(12, 12, 192, value_dim=128),
    "cp_3_1": Shape(12, 12, 192, causal=False, value_dim=128),
    "cp_3_2": Shape(12, 12, 192, window=True, value_dim=128),
    "cp_4_0": Shape(64, 8, 64),
    "cp_4_1": Shape(64, 8, 64, sinks="off-by-one"),
    "cp_4_2": Shape(64, 8, 64, sinks="learnable"),
}
#: Layouts: as many packed documents as they have sequences (thd), or none. Each shape has one always.
CASES = [
    pytest.param(
        *(name, packed),
        id=f"{name}-{'thd' if packed else 'sbhd'}",
        marks=pytest.mark.slow if shape.causal and packed is (number % 2 == 1) else (),
    )
    for (number, (name, shape)), packed in itertools.product(enumerate(SHAPES.items()), (False, True))
    if shape.causal or not packed
]
PLANS = {
    "one group of three": [[[5, 2, 1]]],
    "three groups": [[[4], [2], [1]]],
    "a pair and one": [[[3, 1], [2]]],
}


@pytest.mark.parametrize(
    "plan",
    [name if name == "a pair and one" else pytest.param(name, marks=pytest.mark.slow) for name in PLANS],
)
@pytest.mark.parametrize("shorter", [16, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "packed"), CASES)
def test_a_shape_is_exact_under_an_uneven_plan(name, packed, shorter, plan):
    shape, tokens = SHAPES[name], 4096 // shorter
    workload = Workload(
        *(tokens, shape.heads, shape.kv_heads, shape.head_dim), causal=shape.causal, value_dim=shape.value_dim
    )
    # Two lengths of the many that its tests draw: neither divides by the number of ranks.
    documents = (tokens // 3 + 1, tokens - tokens // 3 - 1) if packed else None
    mask = Mask(shape.causal, 512 // shorter if shape.window else None, documents)
    problem = random_problem(workload, 2, torch.float32, mask=mask, has_sinks=shape.sinks != "vanilla")
    if shape.sinks == "off-by-one":
        problem = dataclasses.replace(problem, sinks=torch.zeros(shape.heads))
    found = planned_results(proportional_plan(workload, PLANS[plan]), problem)
    for result, exact in zip(found, by_kv_head(problem), strict=True):
        torch.testing.assert_close(result, exact, atol=2e-4, rtol=2e-4)


def by_kv_head(problem: Problem) -> list[torch.Tensor]:
    """Plain attention, one KV head with its queries at a time: all scores at once would not fit in memory."""
    sharing = problem.query.shape[2] // problem.key.shape[2]
    parts = []
    for kv in range(problem.key.shape[2]):
        queries, keys = slice(kv * sharing, (kv + 1) * sharing), slice(kv, kv + 1)
        part = dataclasses.replace(
            problem,
            query=problem.query[:, :, queries],
            key=problem.key[:, :, keys],
            value=problem.value[:, :, keys],
            grad_output=problem.grad_output[:, :, queries],
            sinks=None if problem.sinks is None else problem.sinks[queries],
        )
        parts.append(plain_results(part))
    *tensors, last = zip(*parts, strict=True)
    joined = [torch.cat(some, dim=2) for some in tensors]
    return [*joined, torch.cat(last, dim=2 if problem.sinks is None else 0)]
