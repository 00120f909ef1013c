"""torch's FlashAttention-2 for CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hexi.runtime.kernels.base import KernelOnOffer, Sequences, packed, unpacked

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
        ends, most = _lengths(query, key, sequences)
        there, back = (_swapped, _swapped) if sequences is None else (packed, unpacked)
        output, log_sum_exp, *_ = torch.ops.aten._flash_attention_forward(
            there(query), there(key), there(value), *ends, *most, 0.0, causal, False, scale=scale
        )
        # Of several sequences the log-sum-exp is [H, Q].
        return back(output), log_sum_exp.view(query.shape[:3])

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
        # Without dropout the two generator states are not read; any tensors of their type will do.
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)
        ends, most = _lengths(query, key, sequences)
        there, back = (_swapped, _swapped) if sequences is None else (packed, unpacked)
        tensors = (there(tensor) for tensor in (grad_output, query, key, value, output))
        grads = torch.ops.aten._flash_attention_backward(
            *tensors,
            log_sum_exp if sequences is None else log_sum_exp[0],
            *ends,
            *most,
            0.0,
            causal,
            state,
            unused,
            scale=scale,
        )
        grad_query, grad_key, grad_value = (back(grad) for grad in grads)
        return grad_query, grad_key, grad_value


def _swapped(tensor: Tensor) -> Tensor:
    """Transpose [B, H, rows, D] to [B, rows, H, D], or the reverse."""
    return tensor.transpose(1, 2)


def _lengths(
    query: Tensor, key: Tensor, sequences: Sequences | None
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[int, int]]:
    """Return the ends of sequences in queries and keys (``None``: one sequence), and the largest lengths."""
    if sequences is None:
        return (None, None), (query.shape[2], key.shape[2])
    return (sequences.query_ends, sequences.key_ends), (max(sequences.queries), max(sequences.keys))
