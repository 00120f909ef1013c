"""The interface of attention kernels, a plain kernel as their reference, and the choice for each block.

Shape letters: B batch, H query heads, K KV heads (K divides H), Q queries, S keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


def is_deterministic() -> bool:
    """Whether results must be bitwise equal in every run, as by `torch.use_deterministic_algorithms`.

    Megatron's ``--deterministic-mode`` calls this function. If it is set only to warn, results may differ, as
    those of torch's own kernels.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()


@dataclass(frozen=True)
class Sequences:
    """Sizes of the blocks of a kernel call, whose rows follow one another; no block is empty.

    Args:
        query_ends: 0, followed by the end of each block's queries, int32, on the kernel's device.
        key_ends: 0, followed by the end of each block's keys, int32, on the kernel's device.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_ends: Tensor
    key_ends: Tensor

    def runs(self) -> Iterator[tuple[slice, slice, int]]:
        """Yield runs of equally large blocks: slice of queries, slice of keys, and number of blocks."""
        query = key = 0
        for (queries, keys), alike in groupby(zip(self.queries, self.keys, strict=True)):
            count = len(list(alike))
            yield slice(query, query + count * queries), slice(key, key + count * keys), count
            query, key = query + count * queries, key + count * keys


class BlockKind(NamedTuple):
    """The properties of a kernel call that decide which kernel computes it, known without device values.

    Args:
        query: shape of the query, [B, H, Q, D].
        key: shape of the key, [B, K, S, D].
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    causal: bool
    device: torch.device
    sequences: Sequences | None = None


class Mode(NamedTuple):
    """The mask and the scale by which the queries of a kernel call see its keys.

    Args:
        causal: whether the blocks are causal; only set for square blocks.
        sequences: sizes of the blocks, each of whose queries see its own keys only; ``None``: a single block.
    """

    causal: bool
    scale: float
    sequences: Sequences | None = None


class Kernel(Protocol):
    """An attention kernel for one or several blocks whose results can be merged with those of other blocks.

    The forward pass returns the output and the log-sum-exp of each row; the backward pass takes the merged
    output and log-sum-exp of all blocks, so that the gradients of a block are exact summands of the whole
    gradients.

    Shapes: query [B, H, Q, D], key [B, K, S, D], value [B, K, S, D]; output and its gradient `grad` as query;
    log-sum-exp `lse` [B, H, Q] in fp32 (fp64 for fp64 inputs). Any strides whose last is 1. No size is 0.

    On CUDA tensors can be read by 16 bytes (`dispatch.aligned`), and the log-sum-exp is contiguous
    (`dispatch.aligned_log_sum_exp`).
    """

    name: str

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp of a call."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of query, key and value of this block, from merged output and log-sum-exp."""


class KernelOnOffer(Kernel, Protocol):
    """A kernel that users can choose by name, with tests for the tensors and blocks that it can compute."""

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why the kernel cannot be used for such tensors; ``None`` if it can."""

    def takes(self, block: BlockKind) -> bool:
        """Whether the kernel can compute such blocks, forward and backward, of tensors that it accepts."""
        return True


def by_rows(tensor: Tensor, mode: Mode) -> Tensor:
    """Return [B, H, rows, D] as [B, rows, H, D], or of several sequences, for which B is 1, [rows, H, D]."""
    if mode.sequences is None:
        return tensor.transpose(1, 2)
    assert tensor.shape[0] == 1, "several blocks are given one batch at a time"
    return tensor[0].transpose(0, 1)


def by_heads(tensor: Tensor, mode: Mode) -> Tensor:
    """Return what `by_rows` returns as [B, H, rows, D]."""
    return tensor.transpose(1, 2) if mode.sequences is None else tensor.transpose(0, 1)[None]


class DenseKernel(KernelOnOffer, Protocol):
    """A kernel for one block at a time: adjacent blocks of one size become a larger batch."""

    def dense(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of one block."""

    def dense_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of one block."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        if mode.sequences is None:
            return self.dense(query, key, value, mode)
        output = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_empty(query.shape[:3], dtype=wide)
        for rows, keys, count in mode.sequences.runs():
            q, k, v = (_batch(t, where, count) for t, where in ((query, rows), (key, keys), (value, keys)))
            for whole, part in zip((output, lse), self.dense(q, k, v, mode), strict=True):
                _put(whole, rows, count, part)
        return output, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mode.sequences is None:
            return self.dense_backward(grad, query, key, value, output, lse, mode)
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for rows, keys, count in mode.sequences.runs():
            dout, q, out, sums = (_batch(t, rows, count) for t in (grad, query, output, lse))
            k, v = (_batch(t, keys, count) for t in (key, value))
            parts = self.dense_backward(dout, q, k, v, out, sums, mode)
            for whole, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
                _put(whole, where, count, part)
        return grads


class MathKernel(DenseKernel):
    """Attention by plain matrix products, for any device, floating type and head size, with O(Q S) memory.

    It computes in fp32 (fp64 for fp64 inputs), and is the reference and the fallback for all other kernels.
    """

    name = "math"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None if dtype.is_floating_point else f"{dtype} is no floating type"

    def dense(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        grouped, key_wide, value_wide = _widen(query, key), _wide(key), _wide(value)
        scores = _scores(grouped, key_wide, mode)
        log_sum_exp = torch.logsumexp(scores, dim=-1)
        output = torch.exp(scores - log_sum_exp[..., None]) @ value_wide[:, :, None]
        return output.flatten(1, 2).to(query.dtype), log_sum_exp.flatten(1, 2)

    def dense_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        grouped, key_wide, value_wide = _widen(query, key), _wide(key), _wide(value)
        grad_wide, output_wide = _widen(grad, key), _widen(output, key)
        weights = torch.exp(_scores(grouped, key_wide, mode) - lse.view(*grouped.shape[:-1])[..., None])
        # d(score) = weight * (dO·V - dO·O), the softmax's gradient with its row sum taken from O.
        grad_weights = grad_wide @ value_wide[:, :, None].transpose(-1, -2)
        row_sum = (grad_wide * output_wide).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - row_sum) * mode.scale
        grad_query = grad_scores @ key_wide[:, :, None]
        grad_key = (grad_scores.transpose(-1, -2) @ grouped).sum(2)
        grad_value = (weights.transpose(-1, -2) @ grad_wide).sum(2)
        return (
            grad_query.flatten(1, 2).to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
        )


def _batch(tensor: Tensor, rows: slice, count: int) -> Tensor:
    """Return some rows of [B, H, rows, ...] as [B count, H, rows / count, ...]."""
    return tensor[:, :, rows].unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)


def _put(whole: Tensor, rows: slice, count: int, part: Tensor) -> None:
    """Write rows in the shape that `_batch` returns back to their place."""
    part = part.unflatten(0, (-1, count)).transpose(1, 2)
    whole[:, :, rows].unflatten(2, (count, -1)).copy_(part)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _widen(tensor: Tensor, key: Tensor) -> Tensor:
    """Return [B, H, Q, D] as [B, K, H / K, Q, D], in the type of the computation."""
    return _wide(tensor).unflatten(1, (key.shape[1], -1))


def _scores(grouped: Tensor, key: Tensor, mode: Mode) -> Tensor:
    scores = grouped @ key[:, :, None].transpose(-1, -2) * mode.scale
    if mode.causal:
        rows, columns = scores.shape[-2:]
        future = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


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
