"""Attention of one rank's heads over its group's queries, block by block.

Shape letters: B batch, h query heads, k KV heads, G tokens of the group, Q queries and S keys of a call, D
head size (of values, in outputs, where it is another).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_hexi.plan.blocks import Call
from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.call_rows import CallRows, Rows, call_rows
from megatron_hexi.runtime.kernels.base import Kernel


@dataclass
class Queries:
    """What calls take of queries: these, and backward what has come of them.

    Args:
        heads: which query heads, counted as spans do.
        tensors: forward the query [B, h, G, D]; backward the output's gradient, the query, the output of all
            blocks, and the log-sum-exp [B, h, G].
    """

    heads: Range
    tensors: tuple[Tensor, ...]
    _latest: tuple[Rows, list[Tensor]] | None = field(default=None, repr=False)

    def taken(self, rows: Rows) -> list[Tensor]:
        """Some rows of all heads. What an index takes is kept: steps one after another ask for the same."""
        if rows.index is None:
            return [rows.taken(tensor) for tensor in self.tensors]
        if self._latest is None or self._latest[0] is not rows:
            self._latest = rows, [rows.taken(tensor) for tensor in self.tensors]
        return self._latest[1]

    def of(self, heads: Range) -> slice:
        """Where some of the heads are."""
        return slice(heads[0] - self.heads[0], heads[1] - self.heads[0])


@dataclass(frozen=True)
class BlockAttention:
    """Runs a kernel over blocks whose heads may be cut anywhere.

    Args:
        kernel: what computes.
        scale: the softmax scale.
    """

    kernel: Kernel
    scale: float

    def forward(
        self, queries: Queries, key: Tensor, value: Tensor, spans: Sequence[HeadSpan], calls: Iterable[Call]
    ) -> Iterator[tuple[Range, Rows, Tensor, Tensor]]:
        """Of each call and span its heads and queries, output [B, heads, Q, D], log-sum-exp [B, heads, Q].

        Args:
            queries: calls say which rows.
            key: [B, k, keys, D]; calls say which.
            value: likewise.
            spans: query heads beside their KV heads, each with one ratio.
            calls: in any order.
        """
        width = max(queries.tensors[0].shape[3], value.shape[3])
        for call in calls if spans else ():
            rows = call_rows(call, key.device)
            (q,) = (_wide(tensor, width) for tensor in queries.taken(rows.queries))
            k, v = (_wide(rows.keys.taken(tensor), width) for tensor in (key, value))
            for span in spans:
                kv = slice(*span.kv)
                tensors = q[:, queries.of(span.queries)], k[:, kv], v[:, kv]
                output, log_sum_exp = self._each_batch(self.kernel.forward, tensors, rows)
                yield span.queries, rows.queries, output[..., : value.shape[3]], log_sum_exp

    def backward(
        self, queries: Queries, key: Tensor, value: Tensor, spans: Sequence[HeadSpan], calls: Iterable[Call]
    ) -> Iterator[tuple[HeadSpan, CallRows, tuple[Tensor, Tensor, Tensor]]]:
        """Gradients of query, key and value of each call and span; exact parts of the whole's."""
        sizes = queries.tensors[1].shape[3], key.shape[3], value.shape[3]
        width = max(sizes)
        for call in calls if spans else ():
            rows = call_rows(call, key.device)
            *taken, lse = queries.taken(rows.queries)
            grad, q, out = (_wide(tensor, width) for tensor in taken)
            k, v = (_wide(rows.keys.taken(tensor), width) for tensor in (key, value))
            for span in spans:
                heads, kv = queries.of(span.queries), slice(*span.kv)
                tensors = grad[:, heads], q[:, heads], k[:, kv], v[:, kv], out[:, heads], lse[:, heads]
                grads = self._each_batch(self.kernel.backward, tensors, rows)
                grad_query, grad_key, grad_value = (
                    gradient[..., :size] for gradient, size in zip(grads, sizes, strict=True)
                )
                yield span, rows, (grad_query, grad_key, grad_value)

    def _each_batch(self, run: Any, tensors: Sequence[Tensor], rows: CallRows) -> Sequence[Tensor]:
        """What the kernel gives; several sequences it takes one batch at a time."""
        mode: Any = {"causal": rows.causal, "scale": self.scale, "sequences": rows.sequences}
        if rows.sequences is None or len(tensors[0]) == 1:
            return run(*tensors, **mode)
        batches = zip(*(tensor.split(1) for tensor in tensors), strict=True)
        each = [run(*parts, **mode) for parts in batches]
        return [torch.cat(list(parts)) for parts in zip(*each, strict=True)]


def _wide(tensor: Tensor, width: int) -> Tensor:
    """[..., D] padded with zeros to a head size: kernels take one for keys and values.

    Zeros in queries and keys add nothing to a score; zeros in values give zeros in the output.
    """
    missing = width - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor
