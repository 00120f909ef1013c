"""Norms and activations for the CPU that hold no more memory than the fused kernels of a GPU.

Megatron compiles these functions, or takes them from Transformer Engine or apex. A CPU runs them one
operation after another: an RMSNorm keeps its normalised input beside input and output, and the gradient of an
activation makes up to six tensors of its size. Here they do not, so that memory counted on a CPU is what a
plan says of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.patching import patched

_WHY = "a CPU compiles nothing, and would hold the result of each operation of the gradient"


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm that saves only its input and the scale of each row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = inputs.float() if inputs.dtype.itemsize < 4 else inputs
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(inputs, weight, scale)
        return (wide * scale).mul_(weight).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, weight, scale = ctx.saved_tensors
        (grad,) = grads
        normal = inputs * scale  # in the wider type
        grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        weighted = grad * weight.to(normal.dtype)
        mean = (weighted * normal).mean(-1, keepdim=True)
        grad_inputs = weighted.sub_(normal.mul_(mean)).mul_(scale)
        return grad_inputs.to(inputs.dtype), grad_weight, None


class RMSNorm(torch.nn.RMSNorm):
    """Replaces `torch.nn.RMSNorm`, which on a CPU is not one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis.

        Args:
            x: [..., hidden].
        """
        assert self.eps is not None, "Megatron gives it"
        normalised: Tensor = _RMSNormFunction.apply(x, self.weight, self.eps)
        return normalised


def _swiglu_gradient(grad: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient of SwiGLU's input, [..., 2 f], computed without temporary tensors.

    Args:
        grad: gradient of the output, [..., f].
        inputs: inputs of the forward pass, [..., 2 f].
    """
    gate, linear = inputs.chunk(2, -1)
    result = torch.empty_like(inputs)
    grad_gate, grad_linear = result.chunk(2, -1)
    torch.mul(grad, linear, out=grad_gate)
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    torch.ops.aten.silu.out(gate, out=grad_linear)
    grad_linear.mul_(grad)
    return result


@patched("megatron.core.fusions.fused_bias_swiglu:swiglu_back", why=_WHY)
def _of_swiglu(original: Callable[..., Tensor], g: Tensor, y: Tensor) -> Tensor:
    return _swiglu_gradient(g, y)


@patched("megatron.core.fusions.fused_bias_swiglu:bias_swiglu_back", why=_WHY)
def _of_biased_swiglu(original: Callable[..., Tensor], g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return _swiglu_gradient(g, y + bias)


@patched("megatron.core.fusions.fused_bias_gelu:bias_gelu_back", why=_WHY)
def _of_biased_gelu(original: Callable[..., Tensor], g: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    inputs = bias + y
    return torch.ops.aten.gelu_backward.grad_input(g, inputs, approximate="tanh", grad_input=inputs)


FUSED_PATCHES = (
    _of_swiglu,
    _of_biased_swiglu,
    _of_biased_gelu,
)
