"""Attention over blocks, heads and rows: what is cut, taken together and merged is one attention."""

import math

import pytest
import torch

from megatron_hexi.plan import Block, Shape
from megatron_hexi.plan.blocks import together
from megatron_hexi.plan.heads import head_spans, kv_range, spans_in_two
from megatron_hexi.runtime.blocks import BlockAttention, Merger
from megatron_hexi.runtime.call_rows import Rows, call_rows
from megatron_hexi.runtime.kernels import MathKernel
from tests.support.kernels import (
    BY_NAME,
    ON_CPU,
    assert_close,
    attention,
    inputs,
)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("extreme", [1e-3, 30.0])
def test_blocks_that_are_merged_are_one_attention_forward_and_backward(name, extreme):
    """Queries 20 to 31 of a causal sequence: their own block, then two rectangles."""
    kernel, scale = BY_NAME[name], 0.5
    query, key, value, grad = inputs((6, 2, 32, 32, True), torch.float64)
    query = query * extreme  # blocks of very different weight
    own, earlier = slice(20, 32), (slice(0, 7), slice(7, 20))
    rows = query[:, :, own]
    merger = Merger(*kernel.forward(rows, key[:, :, own], value[:, :, own], causal=True, scale=scale))
    for keys in earlier:
        merger.add(
            (0, rows.shape[1]),
            Rows((0, 12)),
            *kernel.forward(rows, key[:, :, keys], value[:, :, keys], causal=False, scale=scale),
        )
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output, log_sum_exp = attention(*leaves, causal=True, scale=scale)
    expected = torch.autograd.grad(output[:, :, own], leaves, grad[:, :, own])
    assert_close([merger.output, merger.log_sum_exp], [output[:, :, own], log_sum_exp[:, :, own]], 1e-11)

    totals = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for keys in (own, *earlier):
        part = kernel.backward(
            grad[:, :, own],
            rows,
            key[:, :, keys],
            value[:, :, keys],
            merger.output,
            merger.log_sum_exp,
            causal=keys is own,
            scale=scale,
        )
        for total, where, gradient in zip(totals, (own, keys, keys), part, strict=True):
            total[:, :, where] += gradient
    assert_close(totals, expected, 1e-10)


def test_a_block_on_some_rows_leaves_the_others_as_they_were():
    kernel = MathKernel()
    query, key, value, _ = inputs((2, 2, 8, 8, False), torch.float32)
    merger = Merger(*kernel.forward(query, key, value, causal=False, scale=1.0))
    before = merger.output.clone()
    merger.add(
        (0, query.shape[1]),
        Rows((3, 5)),
        *kernel.forward(query[:, :, 3:5], key + 1, value + 1, causal=False, scale=1.0),
    )
    changed = (merger.output != before).any(dim=(0, 1, 3))
    assert changed.tolist() == [False, False, False, True, True, False, False, False]


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
    attend = BlockAttention(BY_NAME[name], head_spans((0, 4), 2), 0.3)
    ((taken, *found),) = attend.forward(query, key, value, [call])
    whole = [torch.zeros_like(grad), torch.zeros_like(grad), grad.new_zeros(2, 4, rows)]
    for total, part in zip(whole, (taken.taken(grad), *found), strict=True):
        taken.put(total, part)
    sums = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    attend.add_backward(sums, whole[0], query, key, value, whole[1], whole[2], [call])
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
        assert_close([whole[1][:, :, some], whole[2][:, :, some]], (output, scores.logsumexp(-1)), 1e-12)
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
    blocks = BlockAttention(BY_NAME["aten-cpu"], head_spans(heads, 4), scale)
    parts = query[:, own], key[:, kv], value[:, kv]
    calls = together([own_block])
    ((_, *found),) = blocks.forward(*parts, calls)
    assert_close(found, (output[:, own], log_sum_exp[:, own]), 1e-12)
    expected = grad_query[:, own], grad_key[:, kv], grad_value[:, kv]
    # The same added up in two parts, onto what is there already.
    ones_query, ones_key, ones_value = (torch.ones_like(gradient) for gradient in expected)
    sums = ones_query, ones_key, ones_value
    for spans in spans_in_two(heads, 4):
        part = BlockAttention(BY_NAME["aten-cpu"], spans, scale)
        part.add_backward(sums, grad[:, own], *parts, found[0], found[1], calls)
    assert_close(sums, [1 + gradient for gradient in expected], 1e-12)
