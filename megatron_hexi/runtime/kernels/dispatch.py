"""One kernel out of several, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_hexi.runtime.kernels.base import Kernel, KernelOnOffer, Sequences

#: What the vector loads of CUDA kernels, and their bulk copies, want of every row's address.
_BYTES = 16


class KernelDispatch(Kernel):
    """The first of some kernels that takes a block.

    Which one is seen from sizes alone, so that nothing waits for the device.

    Args:
        kernels: none of which refuses the tensors; the first gives its name, the last takes every block.
    """

    def __init__(self, kernels: Sequence[KernelOnOffer]) -> None:
        self.name = kernels[0].name
        self._kernels = kernels

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        scale: float,
        sequences: Sequences | None = None,
    ) -> tuple[Tensor, Tensor]:
        kernel = self._first(query, key, causal, sequences)
        tensors = aligned(query), aligned(key), aligned(value)
        return kernel.forward(*tensors, causal=causal, scale=scale, sequences=sequences)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        *,
        causal: bool,
        scale: float,
        sequences: Sequences | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if log_sum_exp.is_cuda:
            log_sum_exp = log_sum_exp.contiguous()
            log_sum_exp = log_sum_exp if _is_aligned(log_sum_exp, rows=False) else log_sum_exp.clone()
        return self._first(query, key, causal, sequences).backward(
            aligned(grad_output),
            aligned(query),
            aligned(key),
            aligned(value),
            aligned(output),
            log_sum_exp,
            causal=causal,
            scale=scale,
            sequences=sequences,
        )

    def _first(self, query: Tensor, key: Tensor, causal: bool, sequences: Sequences | None) -> KernelOnOffer:
        return next(kernel for kernel in self._kernels if kernel.takes(query, key, causal, sequences))


def aligned(tensor: Tensor) -> Tensor:
    """A tensor whose rows a CUDA kernel can read by 16 bytes: itself, or where it is none a copy.

    Keys and values travel as columns of one message, and so have the row length of both: with keys of 128 and
    values of 3, only every eighth row begins where it should.
    """
    if not tensor.is_cuda or tensor.shape[-1] * tensor.element_size() % _BYTES or _is_aligned(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_aligned(tensor: Tensor, rows: bool = True) -> bool:
    # torch's allocator aligns storages to 512 bytes; where in one a tensor and its rows begin is left.
    steps = [tensor.storage_offset()]
    if rows:
        sizes = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        steps += [stride for size, stride in sizes if size > 1]
    return not any(step * tensor.element_size() % _BYTES for step in steps)
