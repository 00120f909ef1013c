"""A stand-in in torch for apex's extension `fused_weight_gradient_mlp_cuda`, which no registry has.

By default Megatron adds the gradients of the output layer's weight with it, also where Transformer Engine
computes all other layers. Right, and slower than apex's: the product is written before it is added.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor

NAME = "fused_weight_gradient_mlp_cuda"


def install() -> None:
    """Let ``import fused_weight_gradient_mlp_cuda`` find the stand-in, where apex's extension is missing.

    Call it before Megatron is imported.
    """
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        return
    module = ModuleType(NAME)
    module.__dict__.update(
        wgrad_gemm_accum_fp32=accumulate_in_fp32, wgrad_gemm_accum_fp16=accumulate_in_half_precision
    )
    sys.modules[NAME] = module


def accumulate_in_fp32(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add the gradient of a linear layer's weight to an fp32 buffer.

    Args:
        inputs: of the layer, [..., in].
        grad_output: gradient of its output, [..., out].
        main_grad: [out, in].
    """
    inputs, grad_output = inputs.flatten(0, -2), grad_output.flatten(0, -2)
    if inputs.is_cuda and inputs.dtype != torch.float32:
        main_grad.add_(torch.mm(grad_output.t(), inputs, out_dtype=torch.float32))
    else:
        main_grad.add_(grad_output.t().float() @ inputs.float())


def accumulate_in_half_precision(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add the gradient of a linear layer's weight to a buffer of the layer's own type; arguments as above."""
    main_grad.add_(grad_output.flatten(0, -2).t() @ inputs.flatten(0, -2))
