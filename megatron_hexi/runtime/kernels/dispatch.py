"""Choose a kernel for each block, and align tensors that CUDA kernels read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_hexi.runtime.kernels.base import BlockKind, Kernel, KernelOnOffer

#: Alignment of every row's address that vector loads and bulk copies of CUDA kernels need.
ALIGNMENT_BYTES = 16


class KernelDispatch:
    """A list of kernels; each block is computed by the first kernel that can compute it.

    Args:
        kernels: kernels that accept the tensors; the first gives this object its name, the last can compute
            every block.
    """

    def __init__(self, kernels: Sequence[KernelOnOffer]) -> None:
        self.name = kernels[0].name
        self._kernels = kernels

    def choose(self, block: BlockKind) -> Kernel:
        """Return the kernel that computes such blocks, forward and backward."""
        return next(kernel for kernel in self._kernels if kernel.takes(block))


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor if all its rows are aligned to 16 bytes for CUDA kernels, or else an aligned copy.

    Keys and values are columns of one message, so that a row has the length of both: with keys of 128 and
    values of 3 elements, only every eighth row is aligned.
    """
    if not tensor.is_cuda or tensor.shape[-1] * tensor.element_size() % ALIGNMENT_BYTES:
        return tensor
    # torch's allocator aligns storages to 512 bytes; the offsets of a tensor and its rows in the storage
    # remain.
    sizes = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    steps = [tensor.storage_offset(), *(stride for size, stride in sizes if size > 1)]
    if any(step * tensor.element_size() % ALIGNMENT_BYTES for step in steps):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def aligned_log_sum_exp(log_sum_exp: Tensor) -> Tensor:
    """Return a log-sum-exp [B, heads, Q] if it is contiguous and aligned to 16 bytes, or else such a copy."""
    log_sum_exp = log_sum_exp.contiguous()
    is_aligned = not log_sum_exp.storage_offset() * log_sum_exp.element_size() % ALIGNMENT_BYTES
    return log_sum_exp if is_aligned else log_sum_exp.clone()
