"""Norms and activations of the CPU platform: exact, and no more held than fused kernels hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_hexi.platform.cpu_layers import FUSED_PATCHES, RMSNorm
from megatron_hexi.runtime.all_to_all import compact


def rounding(dtype: torch.dtype) -> float:
    return 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_is_torchs(dtype: torch.dtype):
    torch.manual_seed(1)
    inputs = torch.randn(7, 3, 24, dtype=dtype, requires_grad=True)
    exact = inputs.detach().double().requires_grad_()
    ours = RMSNorm(24, eps=1e-5, dtype=dtype)
    theirs = torch.nn.RMSNorm(24, eps=1e-5, dtype=torch.float64)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(24))
        theirs.weight.copy_(ours.weight)
    grad = torch.randn(7, 3, 24, dtype=dtype)
    ours(inputs).backward(grad)
    theirs(exact).backward(grad.double())
    found = (ours(inputs), inputs.grad, ours.weight.grad)
    for one, other in zip(found, (theirs(exact), exact.grad, theirs.weight.grad), strict=True):
        assert one is not None
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=rounding(dtype), atol=8 * rounding(dtype))


def test_the_norm_keeps_its_input_and_a_number_a_row():
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    inputs, norm = torch.randn(5, 2, 64, requires_grad=True), RMSNorm(64, eps=1e-5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(inputs)
    assert sorted(tensor.numel() for tensor in kept) == [10, 64, 5 * 2 * 64]


def replaced(name: str):
    (patch,) = (patch for patch in FUSED_PATCHES if patch.target.endswith(f":{name}"))
    return patch.build(None)


def biased_gelu(bias: Tensor, inputs: Tensor) -> Tensor:
    return torch.nn.functional.gelu(bias + inputs, approximate="tanh")


def biased_swiglu(bias: Tensor, inputs: Tensor) -> Tensor:
    gate, linear = (inputs + bias).chunk(2, -1)
    return torch.nn.functional.silu(gate) * linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_activations_are_autograds(dtype: torch.dtype):
    torch.manual_seed(2)
    inputs, bias = torch.randn(9, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    kept = inputs.clone(), bias.clone()
    for activation, width, found in (
        (biased_gelu, 16, lambda grad: replaced("bias_gelu_back")(grad, bias, inputs)),
        (biased_swiglu, 8, lambda grad: replaced("bias_swiglu_back")(grad, inputs, bias)),
        (biased_swiglu, 8, lambda grad: replaced("swiglu_back")(grad, inputs + bias)),
    ):
        grad = torch.randn(9, width, dtype=dtype)
        exact = (inputs + bias).double().requires_grad_()
        activation(torch.zeros(16, dtype=torch.float64), exact).backward(grad.double())
        assert exact.grad is not None
        torch.testing.assert_close(
            found(grad).double(), exact.grad, rtol=4 * rounding(dtype), atol=4 * rounding(dtype)
        )
    assert torch.equal(inputs, kept[0])
    assert torch.equal(bias, kept[1])


def test_a_tensor_is_copied_where_it_keeps_memory_that_nobody_uses():
    mixed = torch.randn(10, 6)
    whole = mixed.split([2, 2, 2], dim=1)
    assert all(one is other for one, other in zip(compact(whole), whole, strict=True))
    padded = torch.randn(10, 4)[:9]
    _, value, rows = compact((torch.randn(10, 4), whole[2], padded))
    assert value.untyped_storage().nbytes() == 10 * 2 * 4
    assert torch.equal(value, whole[2])
    assert rows is padded
