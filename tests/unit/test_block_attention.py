"""Attention over blocks, heads and rows: what is cut, taken together and merged is one attention."""

import math

import pytest
import torch

from megatron_hexi.plan import Block, Shape
from megatron_hexi.plan.heads import head_spans, kv_range, spans_in_two
from megatron_hexi.runtime import blocks as block_attention
from megatron_hexi.runtime.blocks import BlockAttention, Merger
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
            (0, 12),
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
        (3, 5),
        *kernel.forward(query[:, :, 3:5], key + 1, value + 1, causal=False, scale=1.0),
    )
    changed = (merger.output != before).any(dim=(0, 1, 3))
    assert changed.tolist() == [False, False, False, True, True, False, False, False]


@pytest.mark.parametrize("shape", Shape)
@pytest.mark.parametrize("size", [5, 60])
def test_blocks_of_one_size_are_one_call_if_they_are_small(shape, size, monkeypatch):
    """Three blocks of a sequence: their results are those of each alone."""
    query, key, value, grad = inputs((4, 2, 3 * size, 3 * size, False), torch.float64, batch=2)
    starts = (0, size), (2 * size, 0), (size, size)
    blocks = [Block((q, q + size), (k, k + size), shape) for q, k in starts]
    monkeypatch.setattr(block_attention, "BUSY_ROWS", 4 * 60)  # of four heads
    calls: list[dict] = []
    kernel = MathKernel()
    monkeypatch.setattr(MathKernel, "forward", log_calls(MathKernel.forward, calls))
    together = BlockAttention(kernel, head_spans((0, 4), 2), 0.3)
    found = {block: results for block, *results in together.forward(query, key, value, blocks)}
    assert len(calls) == (1 if size == 5 else 3)
    for block in blocks:
        rows, keys = slice(*block.queries), slice(*block.keys)
        q, g = query[:, :, rows], grad[:, :, rows]
        leaves = [tensor.clone().requires_grad_() for tensor in (q, key[:, :, keys], value[:, :, keys])]
        seen = {Shape.FULL: lambda s: s, Shape.CAUSAL: torch.tril, Shape.WINDOW_EDGE: torch.triu}[shape]
        hidden = ~seen(torch.ones(size, size, dtype=torch.bool))
        wide = [leaf.repeat_interleave(2, 1) for leaf in leaves[1:]]
        scores = (leaves[0] @ wide[0].mT * 0.3).masked_fill(hidden, -math.inf)
        output = scores.softmax(-1) @ wide[1]
        assert_close(found[block], (output, scores.logsumexp(-1)), 1e-12)
        expected = torch.autograd.grad(output, leaves, g)
        whole = [torch.zeros_like(tensor) for tensor in (grad, grad, scores.new_zeros(2, 4, 3 * size))]
        whole[0][:, :, rows], whole[1][:, :, rows], whole[2][:, :, rows] = g, *found[block]
        sums = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        together.add_backward(sums, whole[0], query, key, value, whole[1], whole[2], [block])
        assert_close([sums[0][:, :, rows], *(total[:, :, keys] for total in sums[1:])], expected, 1e-11)


def log_calls(function, calls):
    def logged(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    return logged


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
    ((_, *found),) = blocks.forward(*parts, [own_block])
    assert_close(found, (output[:, own], log_sum_exp[:, own]), 1e-12)
    expected = grad_query[:, own], grad_key[:, kv], grad_value[:, kv]
    # The same added up in two parts, onto what is there already.
    ones_query, ones_key, ones_value = (torch.ones_like(gradient) for gradient in expected)
    sums = ones_query, ones_key, ones_value
    for spans in spans_in_two(heads, 4):
        part = BlockAttention(BY_NAME["aten-cpu"], spans, scale)
        part.add_backward(sums, grad[:, own], *parts, found[0], found[1], [own_block])
    assert_close(sums, [1 + gradient for gradient in expected], 1e-12)
