"""The copies and sums beside attention kernels, each as one operation on a GPU.

`plain` says what each does, in torch, and does it on CPUs; `on_gpu` does it in one launch. This is the only
place that chooses. Triton comes with torch for CUDA, and needs a C compiler and Python's headers; where one
of them is missing, `plain` does it there too, in more launches.

Shape letters: B batch, h heads, G rows of the whole, Q rows of a part, D size of a head, T tokens of a shard.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.fused import on_gpu, plain
from megatron_hexi.runtime.fused.terms import Slot, Sum, Term
from megatron_hexi.runtime.fused.toolchain import triton_lacks


def combine(target: Sum, terms: Sequence[Term], base: Sum | None = None, sinks: Tensor | None = None) -> None:
    """Write the sum of terms, added up in fp32 (fp64 for fp64); rows that no term has become 0.

    With log-sum-exps it is attention over all keys of the terms: `lse = log(sum exp(lse_i))` and
    `out = sum out_i exp(lse_i - lse)`.

    Args:
        target: where to; any type.
        terms: at most `MOST_TERMS`; of all heads of the target.
        base: one more term, of all rows; may be the target.
        sinks: logits [h] that take part in the log-sum-exp and have no value.
    """
    _implementation(target.value).combine(target, terms, base, sinks)


def copy_rows(target: Tensor, source: Tensor, rows: Rows) -> None:
    """Write some rows of [B, h, G, D] to [B, h, Q, D]."""
    _implementation(target).copy_rows(target, source, rows)


def pack(flat: Tensor, parts: Sequence[Tensor], slots: Sequence[Slot]) -> None:
    """Write heads of tensors to a flat one.

    Args:
        flat: what travels.
        parts: tensors [T, B, heads, D].
        slots: which heads lie where.
    """
    _implementation(flat).pack(flat, parts, slots)


def unpack(parts: Sequence[Tensor], flat: Tensor, slots: Sequence[Slot]) -> None:
    """Write heads of tensors from a flat one; one that lies there several times is added up in fp32."""
    _implementation(flat).unpack(parts, flat, slots)


def _implementation(tensor: Tensor) -> ModuleType:
    return on_gpu if tensor.is_cuda and tensor.dtype != torch.float64 and has_triton() else plain


@cache
def has_triton() -> bool:
    """Whether Triton can launch kernels here; asked on GPUs only, and said once where it cannot."""
    lacks = triton_lacks()
    if lacks:
        warnings.warn(
            f"{lacks}: copies and sums beside attention run in plain torch, with more launches; hexi doctor "
            "says what to install",
            stacklevel=2,
        )
    return not lacks


__all__ = ["Slot", "Sum", "Term", "combine", "copy_rows", "has_triton", "pack", "unpack"]
