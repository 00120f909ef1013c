"""Fused copies and sums around attention kernels, each a single kernel launch on a GPU.

`plain` defines each operation in torch, and runs on CPUs; `on_gpu` runs each operation in one launch. Triton
comes with torch for CUDA, and needs a C compiler and Python's headers; if one of them is missing, `plain`
runs on GPUs too, in more launches.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

import torch

from megatron_hexi.runtime.fused import on_gpu, plain
from megatron_hexi.runtime.fused.toolchain import triton_lacks


def implementation(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return the module, `plain` or `on_gpu`, whose operations compute tensors of a device and type."""
    return on_gpu if device.type == "cuda" and dtype != torch.float64 and has_triton() else plain


@cache
def has_triton() -> bool:
    """Whether Triton can launch kernels on this machine; warns if not. Call it only on GPUs."""
    lacks = triton_lacks()
    if lacks:
        warnings.warn(
            f"{lacks}: copies and sums around attention run in plain torch, with more launches; hexi doctor "
            "says what to install",
            stacklevel=2,
        )
    return not lacks
