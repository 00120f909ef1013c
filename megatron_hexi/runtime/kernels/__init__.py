"""Attention kernels behind one interface, and the choice among them."""

from __future__ import annotations

import torch

from megatron_hexi.errors import PlatformError
from megatron_hexi.runtime.kernels.aten_cpu import AtenCpuKernel
from megatron_hexi.runtime.kernels.aten_flash import AtenFlashKernel
from megatron_hexi.runtime.kernels.base import Kernel, MathKernel
from megatron_hexi.runtime.kernels.cudnn import CudnnKernel
from megatron_hexi.runtime.kernels.flash_attn import flash_attention_2, flash_attention_3

#: All kernels, the fastest first: `auto` takes the first that does not refuse. On Hopper FlashAttention-3
#: is above cuDNN and cuDNN above FlashAttention-2 (FlashAttention-3 paper, arXiv 2407.08608, figures 5-6).
KERNELS: tuple[Kernel, ...] = (
    flash_attention_3(),
    CudnnKernel(),
    flash_attention_2(),
    AtenFlashKernel(),
    AtenCpuKernel(),
    MathKernel(),
)

#: What ``--hexi-kernel`` takes.
KERNEL_NAMES = ("auto", *(kernel.name for kernel in KERNELS))


def select_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel of that name, or with ``auto`` the fastest that takes such tensors.

    Raises:
        PlatformError: the name is unknown, or the kernel refuses; with the reason and those that would do.
    """
    refusals = {kernel.name: kernel.refuses(device, dtype, head_dim) for kernel in KERNELS}
    usable = [kernel for kernel in KERNELS if refusals[kernel.name] is None]
    if name == "auto" and usable:
        return usable[0]
    for kernel in usable:
        if kernel.name == name:
            return kernel
    choices = ", ".join(kernel.name for kernel in usable) or "none"
    reason = refusals.get(name) or "there is none of that name"
    raise PlatformError(
        f"kernel {name}: {reason}; for {dtype} with heads of {head_dim} on {device.type} use: {choices}"
    )


__all__ = ["KERNELS", "KERNEL_NAMES", "Kernel", "MathKernel", "select_kernel"]
