"""What every attention kernel offers, and the plain one that all others are held against.

Shape letters: B batch, H query heads, K KV heads (K divides H), Q queries, S keys, D head size.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


def is_deterministic() -> bool:
    """Whether results must be the same bits in every run.

    `torch.use_deterministic_algorithms` says so, which Megatron's ``--deterministic-mode`` calls. Where it
    only warns, torch's own kernels stay as they are, and ours too.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()


class Kernel(Protocol):
    """Attention over one block, in the form that lets blocks be merged.

    The forward gives the output and the log-sum-exp of each row; the backward takes those of all
    blocks merged, so that the gradients of one block are exact parts of the whole.

    Shapes: query [B, H, Q, D], key [B, K, S, D], value [B, K, S, D]; output as query; log-sum-exp
    [B, H, Q] in fp32 (fp64 for fp64 inputs). Any strides whose last is 1. No size is 0.
    """

    name: str

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp. `causal` is given for square blocks only."""

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
        """Gradients of query, key and value of this block; output and log-sum-exp are the merged ones."""


class KernelOnOffer(Kernel, Protocol):
    """A kernel that can be chosen, for some tensors and some of their blocks.

    On CUDA it is given tensors that it can read by 16 bytes (`dispatch.aligned`), and the log-sum-exp
    contiguous.
    """

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why the kernel cannot be used for such tensors; ``None`` if it can."""

    def takes(self, query: Tensor, key: Tensor, causal: bool) -> bool:
        """Whether it may be given this block, forward and backward; asked for tensors not refused.

        Must not look at values: that would wait for the device.
        """
        return True


class MathKernel(KernelOnOffer):
    """Plain matrix products: any device, any floating type, any head size, O(Q S) memory.

    Computes in fp32 (fp64 for fp64 inputs). The reference, and the way out where nothing else fits.
    """

    name = "math"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None if dtype.is_floating_point else f"{dtype} is no floating type"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        grouped, key_wide, value_wide = _widen(query, key), _wide(key), _wide(value)
        scores = _scores(grouped, key_wide, causal, scale)
        log_sum_exp = torch.logsumexp(scores, dim=-1)
        output = torch.exp(scores - log_sum_exp[..., None]) @ value_wide[:, :, None]
        return output.flatten(1, 2).to(query.dtype), log_sum_exp.flatten(1, 2)

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
        grouped, key_wide, value_wide = _widen(query, key), _wide(key), _wide(value)
        grad, out = _widen(grad_output, key), _widen(output, key)
        weights = torch.exp(
            _scores(grouped, key_wide, causal, scale) - log_sum_exp.view(*grouped.shape[:-1])[..., None]
        )
        # d(score) = weight * (dO·V - dO·O), the softmax's gradient with its row sum taken from O.
        grad_weights = grad @ value_wide[:, :, None].transpose(-1, -2)
        grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * scale
        grad_query = grad_scores @ key_wide[:, :, None]
        grad_key = (grad_scores.transpose(-1, -2) @ grouped).sum(2)
        grad_value = (weights.transpose(-1, -2) @ grad).sum(2)
        return (
            grad_query.flatten(1, 2).to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
        )


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _widen(tensor: Tensor, key: Tensor) -> Tensor:
    """[B, H, Q, D] as [B, K, H / K, Q, D] in the type that is computed in."""
    return _wide(tensor).unflatten(1, (key.shape[1], -1))


def _scores(grouped: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = grouped @ key[:, :, None].transpose(-1, -2) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        future = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores
