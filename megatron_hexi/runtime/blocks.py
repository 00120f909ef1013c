"""Attention of one rank's heads over its group's queries, block by block.

The own group's block is causal (or full); every block against another group's keys is a plain
rectangle. Blocks are merged by their log-sum-exps in fp32 (fp64 for fp64 inputs):

    lse = log(exp(lse_1) + exp(lse_2)),  out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

computed as logaddexp, so that nothing overflows (Rabe and Staats, arXiv 2112.05682; FlashAttention-2,
arXiv 2307.08691, section 3.1). The own block comes first and covers every query, so that every
log-sum-exp is finite from the start.

Shape letters: B batch, h own query heads, k own KV heads, G tokens of the group, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.model import Range
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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Output [B, h, G, D] and log-sum-exp [B, h, G] of one block, of the spans' heads."""
        if not self.spans or not query.numel():  # kernels take no empty tensors
            output = self._nothing(query, self._heads)
            return output, output.new_empty(
                output.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32)
            )
        parts = [
            self.kernel.forward(
                query[:, slice(*span.queries)],
                key[:, slice(*span.kv)],
                value[:, slice(*span.kv)],
                causal=causal,
                scale=self.scale,
            )
            for span in self.spans
        ]
        return _join([out for out, _ in parts]), _join([lse for _, lse in parts])

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block, of the spans' heads.

        They are parts of the whole's, for output and log-sum-exp are the merged ones.
        """
        if not self.spans or not query.numel():
            kv = self.spans[-1].kv[1] - self.spans[0].kv[0] if self.spans else 0
            return self._nothing(query, self._heads), self._nothing(key, kv), self._nothing(value, kv)
        tensors = grad_output, query, key, value, output, log_sum_exp
        parts = [self._gradients(span, *tensors, causal) for span in self.spans]
        grad_query, grad_key, grad_value = (_join(list(grads)) for grads in zip(*parts, strict=True))
        return grad_query, grad_key, grad_value

    def add_backward(
        self,
        sums: tuple[Tensor, Tensor, Tensor],
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        causal: bool,
    ) -> None:
        """Add the gradients of one block to sums of query's, key's and value's; heads of no span are left."""
        if not query.numel():
            return
        tensors = grad_output, query, key, value, output, log_sum_exp
        for span in self.spans:
            grads = self._gradients(span, *tensors, causal)
            for total, heads, grad in zip(sums, (span.queries, span.kv, span.kv), grads, strict=True):
                total[:, slice(*heads)].add_(grad)

    @property
    def _heads(self) -> int:
        return sum(span.queries[1] - span.queries[0] for span in self.spans)

    @staticmethod
    def _nothing(like: Tensor, heads: int) -> Tensor:
        return like.new_empty(like.shape[0], heads, *like.shape[2:])

    def _gradients(
        self,
        span: HeadSpan,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernel.backward(
            grad_output[:, slice(*span.queries)],
            query[:, slice(*span.queries)],
            key[:, slice(*span.kv)],
            value[:, slice(*span.kv)],
            output[:, slice(*span.queries)],
            log_sum_exp[:, slice(*span.queries)],
            causal=causal,
            scale=self.scale,
        )


class Merger:
    """Adds up the outputs of blocks.

    Args:
        output: of the first block, [B, h, G, D], which covers every query.
        log_sum_exp: of the first block, [B, h, G].
    """

    def __init__(self, output: Tensor, log_sum_exp: Tensor) -> None:
        self.output = output.to(log_sum_exp.dtype, copy=True)
        self.log_sum_exp = log_sum_exp.clone()

    def add(self, heads: Range, queries: Range, output: Tensor, log_sum_exp: Tensor) -> None:
        """Add a block that covers some of the heads and of the queries."""
        rows = slice(None), slice(*heads), slice(*queries)
        before = self.log_sum_exp[rows]
        merged = torch.logaddexp(before, log_sum_exp)
        self.output[rows].mul_(torch.exp(before - merged)[..., None]).addcmul_(
            output, torch.exp(log_sum_exp - merged)[..., None]
        )
        self.log_sum_exp[rows] = merged


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
