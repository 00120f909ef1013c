"""Attention kernels with a common interface, and the choice of a kernel."""

from __future__ import annotations

import torch

from megatron_hexi.errors import PlatformError
from megatron_hexi.runtime.kernels.aten import AtenCpuKernel, AtenFlashKernel, CudnnKernel
from megatron_hexi.runtime.kernels.base import (
    BlockKind,
    Kernel,
    KernelDispatch,
    KernelOnOffer,
    MathKernel,
    Mode,
)
from megatron_hexi.runtime.kernels.flash_attn import flash_attention_2, flash_attention_3

_FLASH_3, _CUDNN, _FLASH_2 = flash_attention_3(), CudnnKernel(), (flash_attention_2(), AtenFlashKernel())
_PLAIN = (AtenCpuKernel(), MathKernel())

#: All kernels, the fastest first on Hopper and Blackwell, where FlashAttention-3 is faster than cuDNN, and
#: cuDNN faster than FlashAttention-2 (FlashAttention-3 paper, arXiv 2407.08608, figures 5-6).
KERNELS: tuple[KernelOnOffer, ...] = (_FLASH_3, _CUDNN, *_FLASH_2, *_PLAIN)

#: Values of ``--hexi-kernel``.
KERNEL_NAMES = ("auto", *(kernel.name for kernel in KERNELS))


def ranked_kernels(device: torch.device) -> tuple[KernelOnOffer, ...]:
    """Return all kernels, the fastest on this device first.

    cuDNN is before FlashAttention-2 on compute capabilities 9 and 10 only, as torch has it
    (`check_prefer_cudnn_attention`, in the file that `cudnn` names); on A100 it is slower.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10):
        return KERNELS
    return (_FLASH_3, *_FLASH_2, _CUDNN, *_PLAIN)


def select_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> KernelDispatch:
    """Return the kernel with the given name or, for ``auto``, the fastest kernel for the given tensors.

    Blocks that this kernel cannot compute are given to the fastest kernel that can.

    Raises:
        PlatformError: the name is unknown, or the kernel cannot be used for such tensors; the message has the
            reason and the usable kernels.
    """
    kernels = ranked_kernels(device)
    refusals = {kernel.name: kernel.refuses(device, dtype, head_dim) for kernel in kernels}
    usable = [kernel for kernel in kernels if refusals[kernel.name] is None]
    chosen = [kernel for kernel in usable if name in ("auto", kernel.name)][:1]
    if chosen:
        return KernelDispatch([*chosen, *(kernel for kernel in usable if kernel not in chosen)])
    choices = ", ".join(kernel.name for kernel in usable) or "none"
    reason = refusals.get(name) or "there is none of that name"
    raise PlatformError(
        f"kernel {name}: {reason}; for {dtype} with heads of {head_dim} on {device.type} use: {choices}"
    )


__all__ = [
    "KERNELS",
    "KERNEL_NAMES",
    "BlockKind",
    "Kernel",
    "KernelDispatch",
    "MathKernel",
    "Mode",
    "ranked_kernels",
    "select_kernel",
]
