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
from torch.nn.functional import pad

from megatron_hexi.plan.blocks import Block, Shape
from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.parts import BUSY_ROWS
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
        self, query: Tensor, key: Tensor, value: Tensor, blocks: Iterable[Block]
    ) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Output [B, h, Q, D] and log-sum-exp [B, h, Q] of each block, of the spans' heads.

        Args:
            query: [B, heads, G, D]; blocks say which rows.
            key: [B, KV heads, keys, D]; blocks say which.
            value: likewise.
            blocks: in any order; they come back in another.
        """
        width = max(query.shape[3], value.shape[3])
        for alike in self._alike(blocks if self.spans else ()):
            shape = alike[0].shape
            q = _wide(_taken(query, [block.queries for block in alike], shape), width)
            k, v = (_wide(_taken(t, [block.keys for block in alike], shape), width) for t in (key, value))
            parts = [
                self.kernel.forward(
                    q[:, slice(*span.queries)],
                    k[:, slice(*span.kv)],
                    v[:, slice(*span.kv)],
                    causal=shape is not Shape.FULL,
                    scale=self.scale,
                )
                for span in self.spans
            ]
            output, log_sum_exp = (_join(list(halves)) for halves in zip(*parts, strict=True))
            outputs = _given(output[..., : value.shape[3]], len(alike), shape)
            yield from zip(alike, outputs, _given(log_sum_exp, len(alike), shape), strict=True)

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
        width, sizes = max(query.shape[3], value.shape[3]), (query.shape[3], key.shape[3], value.shape[3])
        for alike in self._alike(blocks):
            shape = alike[0].shape
            rows, keys = [block.queries for block in alike], [block.keys for block in alike]
            grad, q, out = (_wide(_taken(t, rows, shape), width) for t in (grad_output, query, output))
            k, v = (_wide(_taken(t, keys, shape), width) for t in (key, value))
            lse = _taken(log_sum_exp, rows, shape)
            for span in self.spans:
                heads, kv = slice(*span.queries), slice(*span.kv)
                grads = self.kernel.backward(
                    grad[:, heads],
                    q[:, heads],
                    k[:, kv],
                    v[:, kv],
                    out[:, heads],
                    lse[:, heads],
                    causal=shape is not Shape.FULL,
                    scale=self.scale,
                )
                given = (
                    _given(tensor[..., :size], len(alike), shape)
                    for tensor, size in zip(grads, sizes, strict=True)
                )
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

    def _alike(self, blocks: Iterable[Block]) -> list[list[Block]]:
        """Blocks that are one call of the kernel: those of one size, as a larger batch, if they are small.

        Alone such a block would not keep a GPU busy.
        """
        heads = self.queries[1] - self.queries[0]
        calls: dict[object, list[Block]] = {}
        for block in blocks:
            queries, keys = (stop - start for start, stop in (block.queries, block.keys))
            is_small = max(queries, keys) * heads < BUSY_ROWS
            calls.setdefault((queries, keys, block.shape) if is_small else block, []).append(block)
        return list(calls.values())


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


def _taken(tensor: Tensor, ranges: Sequence[Range], shape: Shape) -> Tensor:
    """Rows of [B, heads, rows, ...], several ranges as a larger batch; from behind at a window's edge."""
    parts = [tensor[:, :, slice(*rows)] for rows in ranges]
    taken = parts[0] if len(parts) == 1 else torch.cat(parts)
    return taken.flip(2) if shape is Shape.WINDOW_EDGE else taken


def _given(tensor: Tensor, count: int, shape: Shape) -> Sequence[Tensor]:
    """What `_taken` put together, apart again."""
    return (tensor.flip(2) if shape is Shape.WINDOW_EDGE else tensor).chunk(count)


def _wide(tensor: Tensor, width: int) -> Tensor:
    """[..., D] padded with zeros to a head size: kernels take one for keys and values.

    Zeros in queries and keys add nothing to a score; zeros in values give zeros in the output.
    """
    missing = width - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
