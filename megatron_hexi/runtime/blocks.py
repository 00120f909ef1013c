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

import torch
from torch import Tensor

from megatron_hexi.plan.blocks import Block, Shape
from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.kernels.base import Kernel
from megatron_hexi.runtime.kernels.sizes import backward_of_sizes, forward_of_sizes

#: Blocks of one size with fewer queries than this are one call, as a larger batch: alone they would not fill
#: a GPU (two rounds of 128 rows on an H100's 132 multiprocessors, with 32 heads).
_FEW_QUERIES = 2 * 132 * 128 // 32


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
        self, query: Tensor, key: Tensor, value: Tensor, blocks: Iterable[Block]
    ) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Output [B, h, Q, D] and log-sum-exp [B, h, Q] of each block, of the spans' heads.

        Args:
            query: [B, heads, G, D]; blocks say which rows.
            key: [B, KV heads, keys, D]; blocks say which.
            value: likewise.
            blocks: in any order; they come back in another.
        """
        for alike in _alike(blocks if self.spans else ()):
            shape = alike[0].shape
            q = _taken(query, [block.queries for block in alike], shape)
            k, v = (_taken(tensor, [block.keys for block in alike], shape) for tensor in (key, value))
            parts = [
                forward_of_sizes(
                    self.kernel,
                    q[:, slice(*span.queries)],
                    k[:, slice(*span.kv)],
                    v[:, slice(*span.kv)],
                    causal=shape is not Shape.FULL,
                    scale=self.scale,
                )
                for span in self.spans
            ]
            outputs, sums = (
                _given(_join(list(halves)), len(alike), shape) for halves in zip(*parts, strict=True)
            )
            yield from zip(alike, outputs, sums, strict=True)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        blocks: Iterable[Block],
    ) -> Iterator[tuple[Block, HeadSpan, tuple[Tensor, Tensor, Tensor]]]:
        """Gradients of query, key and value of each block and span; exact parts of the whole's.

        Args:
            grad_output: [B, heads, G, D]; blocks say which rows.
            query: likewise.
            key: [B, KV heads, keys, D]; blocks say which.
            value: likewise.
            output: as `grad_output`, of all blocks merged.
            log_sum_exp: likewise, [B, heads, G].
            blocks: in any order; they come back in another.
        """
        for alike in _alike(blocks):
            shape = alike[0].shape
            rows, keys = [block.queries for block in alike], [block.keys for block in alike]
            grad, q, out, lse = (_taken(t, rows, shape) for t in (grad_output, query, output, log_sum_exp))
            k, v = (_taken(tensor, keys, shape) for tensor in (key, value))
            for span in self.spans:
                heads, kv = slice(*span.queries), slice(*span.kv)
                grads = backward_of_sizes(
                    self.kernel,
                    grad[:, heads],
                    q[:, heads],
                    k[:, kv],
                    v[:, kv],
                    out[:, heads],
                    lse[:, heads],
                    causal=shape is not Shape.FULL,
                    scale=self.scale,
                )
                given = (_given(tensor, len(alike), shape) for tensor in grads)
                for block, *gradients in zip(alike, *given, strict=True):
                    yield block, span, (gradients[0], gradients[1], gradients[2])

    def add_backward(
        self,
        sums: tuple[Tensor, Tensor, Tensor],
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        blocks: Iterable[Block],
    ) -> None:
        """Add the gradients of blocks to sums of query's, key's and value's; heads of no span are left."""
        tensors = grad_output, query, key, value, output, log_sum_exp
        for block, span, grads in self.backward(*tensors, blocks):
            places = (span.queries, block.queries), (span.kv, block.keys), (span.kv, block.keys)
            for total, (heads, rows), grad in zip(sums, places, grads, strict=True):
                total[:, slice(*heads), slice(*rows)].add_(grad)


class Merger:
    """Adds up the outputs of blocks.

    Args:
        output: of the first blocks, [B, h, G, D], which cover every query.
        log_sum_exp: of the first blocks, [B, h, G].
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


def _alike(blocks: Iterable[Block]) -> list[list[Block]]:
    """Blocks that are one call of the kernel."""
    calls: dict[object, list[Block]] = {}
    for block in blocks:
        queries, keys = (stop - start for start, stop in (block.queries, block.keys))
        few = queries < _FEW_QUERIES and keys < _FEW_QUERIES
        calls.setdefault((queries, keys, block.shape) if few else block, []).append(block)
    return list(calls.values())


def _taken(tensor: Tensor, ranges: Sequence[Range], shape: Shape) -> Tensor:
    """Rows of [B, heads, rows, ...], several ranges as a larger batch; from behind at a window's edge."""
    parts = [tensor[:, :, slice(*rows)] for rows in ranges]
    taken = parts[0] if len(parts) == 1 else torch.cat(parts)
    return taken.flip(2) if shape is Shape.WINDOW_EDGE else taken


def _given(tensor: Tensor, count: int, shape: Shape) -> Sequence[Tensor]:
    """What `_taken` put together, apart again."""
    return (tensor.flip(2) if shape is Shape.WINDOW_EDGE else tensor).chunk(count)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
