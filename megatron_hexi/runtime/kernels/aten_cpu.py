"""torch's flash attention for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hexi.runtime.kernels.base import DenseKernel, Mode

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AtenCpuKernel(DenseKernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: fp64, fp32, bf16 and fp16, GQA natively.

    The operator crashes (SIGFPE) on an empty query or key, so it is never given one.
    """

    name = "aten-cpu"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {device.type}"
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it does not take {dtype}"
        return None

    def dense(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        return _FORWARD(query, key, value, 0.0, mode.causal, scale=mode.scale)

    def dense_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _BACKWARD(grad, query, key, value, output, lse, 0.0, mode.causal, scale=mode.scale)
