"""torch's own flash attention: FlashAttention-2 for CUDA, and a kernel for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hexi.runtime.kernels.base import DenseKernel, KernelOnOffer, Mode, by_heads, by_rows

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_HALF_TYPES = (torch.bfloat16, torch.float16)


class AtenFlashKernel(KernelOnOffer):
    """`aten::_flash_attention_forward`: bf16 and fp16 on Ampere and newer, GQA natively.

    The operator takes [B, tokens, heads, D], which is the layout of our all-to-all for a batch of one
    sequence. Its backward pass is deterministic if `torch.use_deterministic_algorithms` asks for it.
    """

    name = "aten-flash"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {device.type}"
        if dtype not in _HALF_TYPES:
            return f"it takes bf16 and fp16, not {dtype}"
        if head_dim % 8 or head_dim > 256:
            return f"it takes head sizes up to 256 that 8 divides, not {head_dim}"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return "it needs compute capability 8.0"
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120, beside cuDNN's (`cudnn.py`).
        if 192 < head_dim <= 224 and ((8, 6) <= capability <= (8, 9) or capability[0] == 12):
            return f"it has no backward for heads of {head_dim} on compute capability {capability}"
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        tensors = (by_rows(tensor, mode) for tensor in (query, key, value))
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            *tensors, *_lengths(query, key, mode), 0.0, mode.causal, False, scale=mode.scale
        )
        # Of several sequences the log-sum-exp is [H, Q].
        return by_heads(output, mode), lse.view(query.shape[:3])

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the two generator states are not read; any tensors of their type will do.
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)
        tensors = (by_rows(tensor, mode) for tensor in (grad, query, key, value, output))
        grads = torch.ops.aten._flash_attention_backward(
            *tensors,
            lse if mode.sequences is None else lse[0],
            *_lengths(query, key, mode),
            *(0.0, mode.causal, state, unused),
            scale=mode.scale,
        )
        grad_query, grad_key, grad_value = (by_heads(gradient, mode) for gradient in grads)
        return grad_query, grad_key, grad_value


def _lengths(query: Tensor, key: Tensor, mode: Mode) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return the ends of sequences in queries and keys (``None``: one sequence), and the largest lengths."""
    if mode.sequences is None:
        return None, None, query.shape[2], key.shape[2]
    ends = mode.sequences.query_ends, mode.sequences.key_ends
    return *ends, max(mode.sequences.queries), max(mode.sequences.keys)


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
