"""Attention of one rank's heads over its group's queries, block by block.

Blocks are merged by their log-sum-exps in fp32 (fp64 for fp64 inputs):

    lse = log(exp(lse_1) + exp(lse_2)),  out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

computed as logaddexp, so that nothing overflows (Rabe and Staats, arXiv 2112.05682; FlashAttention-2,
arXiv 2307.08691, section 3.1). The own group's blocks come first and cover every query, so that every
log-sum-exp is finite from the start.

Shape letters: B batch, h own query heads, k own KV heads, G tokens of the group, Q queries and S keys of a
block, D head size (of values, in outputs, where it is another).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_hexi.plan.blocks import Call
from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.call_rows import CallRows, Rows, call_rows
from megatron_hexi.runtime.kernels.base import Kernel


@dataclass(frozen=True)
class BlockAttention:
    """Runs a kernel over blocks whose heads may be cut anywhere.

    Args:
        kernel: what computes.
        spans: query heads beside their KV heads, each with one ratio; not all of the tensors' heads need be
            among them.
        scale: the softmax scale.
    """

    kernel: Kernel
    spans: Sequence[HeadSpan]
    scale: float

    @property
    def queries(self) -> Range:
        """The query heads of all spans."""
        return (self.spans[0].queries[0], self.spans[-1].queries[1]) if self.spans else (0, 0)

    @property
    def kv(self) -> Range:
        """The KV heads of all spans."""
        return (self.spans[0].kv[0], self.spans[-1].kv[1]) if self.spans else (0, 0)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, calls: Iterable[Call]
    ) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        """Of each call the queries, output [B, h, Q, D] and log-sum-exp [B, h, Q] of the spans' heads.

        Args:
            query: [B, heads, G, D]; calls say which rows.
            key: [B, KV heads, keys, D]; calls say which.
            value: likewise.
            calls: in any order.
        """
        width = max(query.shape[3], value.shape[3])
        for call in calls if self.spans else ():
            rows = call_rows(call, query.device)
            q = _wide(rows.queries.taken(query), width)
            k, v = (_wide(rows.keys.taken(tensor), width) for tensor in (key, value))
            parts = [
                self._forward(q[:, slice(*span.queries)], k[:, slice(*span.kv)], v[:, slice(*span.kv)], rows)
                for span in self.spans
            ]
            output, log_sum_exp = (_join(list(halves)) for halves in zip(*parts, strict=True))
            yield rows.queries, output[..., : value.shape[3]], log_sum_exp

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        calls: Iterable[Call],
    ) -> Iterator[tuple[CallRows, HeadSpan, tuple[Tensor, Tensor, Tensor]]]:
        """Gradients of query, key and value of each call and span; exact parts of the whole's.

        Args:
            grad_output: [B, heads, G, D]; calls say which rows.
            query: likewise.
            key: [B, KV heads, keys, D]; calls say which.
            value: likewise.
            output: as `grad_output`, of all blocks merged.
            log_sum_exp: likewise, [B, heads, G].
            calls: in any order.
        """
        width, sizes = max(query.shape[3], value.shape[3]), (query.shape[3], key.shape[3], value.shape[3])
        for call in calls if self.spans else ():
            rows = call_rows(call, query.device)
            grad, q, out = (_wide(rows.queries.taken(t), width) for t in (grad_output, query, output))
            k, v = (_wide(rows.keys.taken(t), width) for t in (key, value))
            lse = rows.queries.taken(log_sum_exp)
            for span in self.spans:
                heads, kv = slice(*span.queries), slice(*span.kv)
                tensors = grad[:, heads], q[:, heads], k[:, kv], v[:, kv], out[:, heads], lse[:, heads]
                grads = (
                    tensor[..., :size]
                    for tensor, size in zip(self._backward(tensors, rows), sizes, strict=True)
                )
                grad_query, grad_key, grad_value = grads
                yield rows, span, (grad_query, grad_key, grad_value)

    def add_backward(
        self,
        sums: tuple[Tensor, Tensor, Tensor],
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        calls: Iterable[Call],
    ) -> None:
        """Add the gradients of calls to sums of query's, key's and value's; heads of no span are left."""
        tensors = grad_output, query, key, value, output, log_sum_exp
        for rows, span, grads in self.backward(*tensors, calls):
            places = (span.queries, rows.queries), (span.kv, rows.keys), (span.kv, rows.keys)
            for total, (heads, some), grad in zip(sums, places, grads, strict=True):
                some.add(total[:, slice(*heads)], grad)

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, rows: CallRows) -> tuple[Tensor, Tensor]:
        mode: Any = {"causal": rows.causal, "scale": self.scale, "sequences": rows.sequences}
        if rows.sequences is None or len(query) == 1:
            return self.kernel.forward(query, key, value, **mode)
        each = [
            self.kernel.forward(*parts, **mode)
            for parts in zip(query.split(1), key.split(1), value.split(1), strict=True)
        ]
        output, log_sum_exp = (torch.cat(list(parts)) for parts in zip(*each, strict=True))
        return output, log_sum_exp

    def _backward(self, tensors: Sequence[Tensor], rows: CallRows) -> Sequence[Tensor]:
        mode: Any = {"causal": rows.causal, "scale": self.scale, "sequences": rows.sequences}
        if rows.sequences is None or len(tensors[0]) == 1:
            return self.kernel.backward(*tensors, **mode)
        batches = zip(*(tensor.split(1) for tensor in tensors), strict=True)
        each = [self.kernel.backward(*parts, **mode) for parts in batches]
        return [torch.cat(list(parts)) for parts in zip(*each, strict=True)]


class Merger:
    """Adds up the outputs of blocks.

    Args:
        output: of the first blocks, [B, h, G, D], which cover every query.
        log_sum_exp: of the first blocks, [B, h, G].
    """

    def __init__(self, output: Tensor, log_sum_exp: Tensor) -> None:
        self.output = output.to(log_sum_exp.dtype, copy=True)
        self.log_sum_exp = log_sum_exp.clone()

    def add(self, heads: Range, queries: Rows, output: Tensor, log_sum_exp: Tensor) -> None:
        """Add a call that covers some of the heads and of the queries."""
        total, sums = (tensor[:, slice(*heads)] for tensor in (self.output, self.log_sum_exp))
        before = queries.taken(sums)
        merged = torch.logaddexp(before, log_sum_exp)
        weighed = queries.taken(total) if queries.index is None else queries.taken(total).contiguous()
        weighed.mul_(torch.exp(before - merged)[..., None]).addcmul_(
            output, torch.exp(log_sum_exp - merged)[..., None]
        )
        if queries.index is not None:
            queries.put(total, weighed)
        queries.put(sums, merged)


def _wide(tensor: Tensor, width: int) -> Tensor:
    """[..., D] padded with zeros to a head size: kernels take one for keys and values.

    Zeros in queries and keys add nothing to a score; zeros in values give zeros in the output.
    """
    missing = width - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
