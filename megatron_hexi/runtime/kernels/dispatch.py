"""Chooses one of several kernels for each block, and aligns what CUDA kernels read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_hexi.runtime.kernels.base import BlockKind, Kernel, KernelOnOffer

#: What the vector loads of CUDA kernels, and their bulk copies, want of every row's address.
ALIGNMENT_BYTES = 16


class KernelDispatch:
    """The first of some kernels that takes a block.

    Args:
        kernels: none of which refuses the tensors; the first gives its name, the last takes every block.
    """

    def __init__(self, kernels: Sequence[KernelOnOffer]) -> None:
        self.name = kernels[0].name
        self._kernels = kernels

    def choose(self, block: BlockKind) -> Kernel:
        """The kernel that computes such blocks, forward and backward."""
        return next(kernel for kernel in self._kernels if kernel.takes(block))


def aligned(tensor: Tensor) -> Tensor:
    """A tensor whose rows a CUDA kernel can read by 16 bytes, and so those of its slices: itself or a copy.

    Keys and values travel as columns of one message, and so have the row length of both: with keys of 128 and
    values of 3, only every eighth row begins where it should.
    """
    if not tensor.is_cuda or tensor.shape[-1] * tensor.element_size() % ALIGNMENT_BYTES:
        return tensor
    # torch's allocator aligns storages to 512 bytes; where in one a tensor and its rows begin is left.
    sizes = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    steps = [tensor.storage_offset(), *(stride for size, stride in sizes if size > 1)]
    if any(step * tensor.element_size() % ALIGNMENT_BYTES for step in steps):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def aligned_log_sum_exp(log_sum_exp: Tensor) -> Tensor:
    """[B, heads, Q] contiguous, beginning where a CUDA kernel can read it by 16 bytes: itself or a copy."""
    log_sum_exp = log_sum_exp.contiguous()
    is_aligned = not log_sum_exp.storage_offset() * log_sum_exp.element_size() % ALIGNMENT_BYTES
    return log_sum_exp if is_aligned else log_sum_exp.clone()
