"""Attention over blocks, heads and rows: what is cut, taken together and merged is one attention."""

import itertools
import math

import pytest
import torch

from megatron_hexi.plan import Block, Shape
from megatron_hexi.plan.blocks import together
from megatron_hexi.plan.heads import head_spans, kv_range, spans_in_two
from megatron_hexi.runtime.attention_blocks import BlockAttention, Queries
from megatron_hexi.runtime.call_rows import Rows, call_rows
from megatron_hexi.runtime.kernels import KernelDispatch, Mode
from megatron_hexi.runtime.sums import RowSum
from tests.support.compiled import carried_out
from tests.support.kernels import (
    BY_NAME,
    ON_CPU,
    assert_close,
    attention,
    inputs,
)


def forward(kernel, scale, spans, calls, query, key, value):
    """Output and log-sum-exp of all rows of the query."""

    def build(recorder, query, key, value):
        queries, merged = Queries((0, query.shape[1]), (query,)), RowSum(recorder, query.shape, weighed=True)
        blocks = BlockAttention(recorder, KernelDispatch([kernel]), scale)
        for term in blocks.forward(queries, key, value, spans, calls):
            merged.add(*term)
        return merged.result()

    return carried_out(build, query, key, value)


def gradients(kernel, scale, spans, calls, grad, query, key, value, *merged):
    """Gradients of query, key and value, given output and log-sum-exp; spans in several turns."""

    def build(recorder, grad, query, key, value, *merged):
        queries = Queries((0, query.shape[1]), (grad, query, *merged))
        blocks = BlockAttention(recorder, KernelDispatch([kernel]), scale)
        sums = [RowSum(recorder, tensor.shape) for tensor in (query, key, value)]
        for some in spans:
            for span, rows, grads in blocks.backward(queries, key, value, some, calls):
                places = (span.queries, rows.queries), (span.kv, rows.keys), (span.kv, rows.keys)
                for total, place, gradient in zip(sums, places, grads, strict=True):
                    total.add(*place, gradient)
        return [total.result()[0] for total in sums]

    return carried_out(build, grad, query, key, value, *merged)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("extreme", [1e-3, 30.0])
def test_blocks_that_are_merged_are_one_attention_forward_and_backward(name, extreme):
    """Queries 20 to 31 of a causal sequence: their own block, then two rectangles."""
    kernel, scale = BY_NAME[name], 0.5
    query, key, value, grad = inputs((6, 2, 32, 32, True), torch.float64)
    query = query * extreme  # blocks of very different weight
    own, earlier = slice(20, 32), (slice(0, 7), slice(7, 20))
    rows = query[:, :, own]
    terms = [
        kernel.forward(rows, key[:, :, keys], value[:, :, keys], Mode(keys is own, scale))
        for keys in (own, *earlier)
    ]

    def merged(recorder, *values):
        total = RowSum(recorder, tuple(rows.shape), weighed=True)
        for term in zip(values[::2], values[1::2], strict=True):
            total.add((0, rows.shape[1]), Rows((0, 12)), *term)
        return total.result()

    out, lse = carried_out(merged, *itertools.chain(*terms))
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output, log_sum_exp = attention(*leaves, causal=True, scale=scale)
    expected = torch.autograd.grad(output[:, :, own], leaves, grad[:, :, own])
    assert_close([out, lse], [output[:, :, own], log_sum_exp[:, :, own]], 1e-11)

    totals = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for keys in (own, *earlier):
        tensors = grad[:, :, own], rows, key[:, :, keys], value[:, :, keys]
        part = kernel.backward(*tensors, out, lse, Mode(keys is own, scale))
        for total, where, gradient in zip(totals, (own, keys, keys), part, strict=True):
            total[:, :, where] += gradient
    assert_close(totals, expected, 1e-10)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("shape", Shape)
@pytest.mark.parametrize("sizes", [(5, 5, 5), (3, 8, 1)])
def test_several_blocks_are_one_call_with_the_results_of_each_alone(name, shape, sizes):
    """Rows between the blocks are in none, so that queries and keys are taken out."""
    starts = [0, sizes[0] + 2, sizes[0] + sizes[1] + 2]
    rows = sum(sizes) + 4
    query, key, value, grad = inputs((4, 2, rows, rows, False), torch.float64, batch=2)
    blocks = [
        Block((start, start + size), (start + 1, start + 1 + size), shape)
        for start, size in zip(starts, sizes, strict=True)
    ]
    (call,) = together(blocks)
    how, spans = (BY_NAME[name], 0.3), head_spans((0, 4), 2)
    found = forward(*how, spans, [call], query, key, value)
    sums = gradients(*how, [spans], [call], grad, query, key, value, *found)
    for block in blocks:
        some, keys = slice(*block.queries), slice(*block.keys)
        size = block.queries[1] - block.queries[0]
        leaves = [
            tensor.clone().requires_grad_()
            for tensor in (query[:, :, some], key[:, :, keys], value[:, :, keys])
        ]
        seen = {Shape.FULL: lambda s: s, Shape.CAUSAL: torch.tril, Shape.WINDOW_EDGE: torch.triu}[shape]
        hidden = ~seen(torch.ones(size, size, dtype=torch.bool))
        wide = [leaf.repeat_interleave(2, 1) for leaf in leaves[1:]]
        scores = (leaves[0] @ wide[0].mT * 0.3).masked_fill(hidden, -math.inf)
        output = scores.softmax(-1) @ wide[1]
        assert_close([part[:, :, some] for part in found], (output, scores.logsumexp(-1)), 1e-12)
        expected = torch.autograd.grad(output, leaves, grad[:, :, some])
        assert_close([sums[0][:, :, some], *(total[:, :, keys] for total in sums[1:])], expected, 1e-11)


def test_blocks_that_overlap_are_calls_of_their_own():
    first, same_keys, same_queries = Block((0, 2), (0, 3)), Block((2, 4), (0, 3)), Block((2, 4), (3, 5))
    calls = together([first, same_keys, same_queries, Block((4, 6), (5, 7), Shape.CAUSAL)])
    assert [call.blocks for call in calls] == [
        (first, same_queries),
        (same_keys,),
        (Block((4, 6), (5, 7), Shape.CAUSAL),),
    ]
    assert call_rows(calls[0], torch.device("cpu")).queries == Rows((0, 4)), "a view, not a copy"


@pytest.mark.parametrize("heads", [(0, 8), (1, 8), (3, 9), (2, 6), (5, 6), (0, 12)])
def test_heads_may_be_cut_anywhere(heads):
    """A member's heads of a layer with 12 query heads over 3 KV heads: those of the whole layer."""
    scale, (first, last) = 0.5, kv_range(heads, 4)
    query, key, value, grad = inputs((12, 3, 9, 9, True), torch.float64)
    own, kv = slice(*heads), slice(first, last)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output, log_sum_exp = attention(*leaves, causal=True, scale=scale)
    grad_query, grad_key, grad_value = torch.autograd.grad(output[:, own], leaves, grad[:, own])
    own_block = Block((0, 9), (0, 9), Shape.CAUSAL)
    how, spans = (BY_NAME["aten-cpu"], scale), head_spans(heads, 4)
    parts = query[:, own], key[:, kv], value[:, kv]
    calls = together([own_block])
    found = forward(*how, spans, calls, *parts)
    assert_close(found, (output[:, own], log_sum_exp[:, own]), 1e-12)
    expected = grad_query[:, own], grad_key[:, kv], grad_value[:, kv]
    # The same added up in two parts.
    result = gradients(*how, spans_in_two(heads, 4), calls, grad[:, own], *parts, *found)
    assert_close(result, expected, 1e-12)
