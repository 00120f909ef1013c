"""Attention written out with einsum and differentiated by autograd, and a kernel's results beside it."""

import math

import pytest
import torch

from megatron_hexi.runtime.kernels import KERNELS, Mode

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
ON_CPU = ["aten-cpu", "math"]
ON_CUDA = ["flash-attn-3", "cudnn", "flash-attn-2", "aten-flash"]

# Query heads, KV heads, queries, keys, causal.
SHAPES = {
    "MHA": (3, 3, 16, 16, False),
    "GQA": (8, 2, 16, 24, False),
    "MQA": (4, 1, 24, 16, False),
    "one token": (2, 1, 1, 1, True),
    "one query": (4, 2, 1, 37, False),
    "one key": (4, 2, 37, 1, False),
    "odd": (6, 3, 33, 67, False),
    "odd causal": (6, 2, 129, 129, True),
    "even causal": (4, 4, 64, 64, True),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def attention(query, key, value, *, causal, scale):
    """Output and log-sum-exp of [B, H, Q, D] and [B, K, S, D], in the type given."""
    sharing = query.shape[1] // key.shape[1]
    scores = torch.einsum("bhqd,bhsd->bhqs", query, key.repeat_interleave(sharing, 1)) * scale
    if causal:
        future = torch.arange(key.shape[2]) > torch.arange(query.shape[2])[:, None]
        scores = scores.masked_fill(future.to(scores.device), -math.inf)
    output = torch.einsum("bhqs,bhsd->bhqd", scores.softmax(-1), value.repeat_interleave(sharing, 1))
    return output, scores.logsumexp(-1)


def inputs(shape, dtype, head_dim=16, device="cpu", batch=2):
    heads, kv_heads, queries, keys, _ = shape
    generator = torch.Generator().manual_seed(heads * 1000 + queries)
    sizes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    return [
        torch.randn(batch, *size, head_dim, generator=generator, dtype=torch.float64).to(device, dtype)
        for size in sizes
    ]


def truth(query, key, value, grad, *, causal, scale, dtype=torch.float64):
    """Output, log-sum-exp and three gradients, computed in a type; log-sum-exp first."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
    output, log_sum_exp = attention(*leaves, causal=causal, scale=scale)
    return [log_sum_exp.detach(), output.detach(), *torch.autograd.grad(output, leaves, grad.to(dtype))]


def results(kernel, query, key, value, grad, **mode):
    output, log_sum_exp = kernel.forward(query, key, value, Mode(**mode))
    grads = kernel.backward(grad, query, key, value, output, log_sum_exp, Mode(**mode))
    assert [tensor.shape for tensor in (output, *grads)] == [t.shape for t in (query, query, key, value)]
    assert {tensor.dtype for tensor in (output, *grads)} == {query.dtype}
    assert log_sum_exp.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    return [log_sum_exp, output, *grads]


def rms(tensor):
    return float(tensor.double().square().mean().sqrt())


def assert_close(found, expected, tolerance):
    for result, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(result.double(), exact.double(), atol=tolerance, rtol=tolerance)


def assert_as_precise_as_plain(found, tensors, *, causal, scale):
    """Each error at most twice that of plain attention in the same type."""
    exact = truth(*tensors, causal=causal, scale=scale)
    plain = truth(*tensors, causal=causal, scale=scale, dtype=tensors[0].dtype)
    # With one key plain attention is exact and some gradients are 0: what is left is to round to the type.
    rounding = torch.finfo(tensors[0].dtype).eps / 2 * max(rms(right) for right in exact)
    for number, (result, rough, right) in enumerate(zip(found, plain, exact, strict=True)):
        least = rounding if tensors[1].shape[2] == 1 else 0
        assert rms(result - right) <= max(2 * rms(rough - right), least), number
