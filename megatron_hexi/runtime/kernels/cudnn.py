"""cuDNN's attention through torch."""

from __future__ import annotations

import torch
from torch import Tensor


class CudnnKernel:
    """`aten::_scaled_dot_product_cudnn_attention`: bf16 and fp16, the fastest that torch ships on Hopper."""

    name = "cudnn"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {device.type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bf16 and fp16, not {dtype}"
        if head_dim % 8 or head_dim > 128:
            return f"it takes head sizes up to 128 that 8 divides, not {head_dim}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0"
        if not torch.backends.cudnn.is_available():
            return "torch was built without cuDNN"
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        return output, log_sum_exp.view(query.shape[:3])

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout seed and offset are not read.
        unused = torch.empty((), dtype=torch.int64, device=query.device)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_output,
            query,
            key,
            value,
            output,
            log_sum_exp.contiguous()[..., None],
            unused,
            unused,
            None,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            scale=scale,
        )
