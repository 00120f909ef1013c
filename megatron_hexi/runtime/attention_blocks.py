"""Record the kernel calls that compute attention of a rank's heads block by block.

Shape letters: B batch, h query heads, k KV heads, G tokens of the group, Q queries and S keys of a call, D
size of a head (in outputs, size of a head's value).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.plan.blocks import Call
from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.call_rows import CallRows, Rows, call_rows
from megatron_hexi.runtime.compiled import Recorder, Value
from megatron_hexi.runtime.kernels.base import BlockKind, KernelDispatch, Mode, aligned_log_sum_exp


@dataclass
class Queries:
    """The tensors with a row per query that a pass needs, for a range of query heads.

    Args:
        heads: range of query heads, counted as in `HeadSpan`.
        tensors: in the forward pass the query [B, h, G, D]; in the backward pass the output's gradient, the
            query, the merged output, and the merged log-sum-exp [B, h, G].
    """

    heads: Range
    tensors: Sequence[Value]
    _latest: tuple[Rows, list[Value]] | None = field(default=None, repr=False)

    def take(self, rows: Rows, recorder: Recorder) -> list[Value]:
        """Return the given rows of each tensor; copies are cached, since successive steps reuse them."""
        if rows.index is None:
            return [take(rows, tensor, recorder) for tensor in self.tensors]
        if self._latest is None or self._latest[0] is not rows:
            self._latest = rows, [take(rows, tensor, recorder) for tensor in self.tensors]
        return self._latest[1]

    def within(self, heads: Range) -> Range:
        """Return a range of heads as indices into the heads of these tensors."""
        return heads[0] - self.heads[0], heads[1] - self.heads[0]


@dataclass(frozen=True)
class BlockAttention:
    """A recorder of kernel calls over blocks, for any ranges of query heads."""

    recorder: Recorder
    kernel: KernelDispatch
    scale: float

    def forward(
        self, queries: Queries, key: Value, value: Value, spans: Sequence[HeadSpan], calls: Iterable[Call]
    ) -> Iterator[tuple[Range, Rows, Value, Value]]:
        """Record the forward pass: a run of the kernel for every call and span of heads.

        Args:
            queries: queries; each call names the rows that it uses.
            key: keys [B, k, rows, D]; each call names the rows that it uses.
            value: values [B, k, rows, D], of the same rows.
            spans: query heads with the KV heads that they read, equally many query heads per KV head.

        Returns:
            For each call and span: its heads, its query rows, output [B, heads, Q, D] and log-sum-exp
            [B, heads, Q].
        """
        width = max(queries.tensors[0].shape[3], value.shape[3])
        for call in calls if spans else ():
            rows = call_rows(call, self.recorder.device)
            (q,) = (self._wide(tensor, width) for tensor in queries.take(rows.queries, self.recorder))
            k, v = (self._wide(take(rows.keys, tensor, self.recorder), width) for tensor in (key, value))
            for span in spans:
                tensors = [part.cut(None, span.kv) for part in (k, v)]
                tensors.insert(0, q.cut(None, queries.within(span.queries)))
                shape = tensors[0].shape
                run = self._run("forward", tensors[0], tensors[1], rows)
                output, log_sum_exp = self.recorder.make_each(run, [shape, shape[:3]], *tensors)
                cut = output.cut(None, None, None, (0, value.shape[3]))
                yield span.queries, rows.queries, cut, log_sum_exp

    def backward(
        self, queries: Queries, key: Value, value: Value, spans: Sequence[HeadSpan], calls: Iterable[Call]
    ) -> Iterator[tuple[HeadSpan, CallRows, list[Value]]]:
        """Record the backward pass: a run of the kernel for every call and span of heads.

        Returns:
            For each call and span: its heads, its rows, and its exact summands of the gradients of query, key
            and value.
        """
        sizes = queries.tensors[1].shape[3], key.shape[3], value.shape[3]
        width = max(sizes)
        for call in calls if spans else ():
            rows = call_rows(call, self.recorder.device)
            *wide, lse = queries.take(rows.queries, self.recorder)
            grad, q, out = (self._wide(tensor, width) for tensor in wide)
            k, v = (self._wide(take(rows.keys, tensor, self.recorder), width) for tensor in (key, value))
            for span in spans:
                heads = queries.within(span.queries)
                own_grad, own_q, own_out, own_lse = (part.cut(None, heads) for part in (grad, q, out, lse))
                own_k, own_v = (part.cut(None, span.kv) for part in (k, v))
                shapes = [part.shape for part in (own_q, own_k, own_v)]
                run = self._run("backward", own_q, own_k, rows)
                tensors = own_grad, own_q, own_k, own_v, own_out, own_lse
                grads = self.recorder.make_each(run, shapes, *tensors)
                yield (
                    span,
                    rows,
                    [part.cut(None, None, None, (0, size)) for part, size in zip(grads, sizes, strict=True)],
                )

    def _wide(self, value: Value, width: int) -> Value:
        """Pad [..., D] with zeros to `width`, since kernels need keys and values of the same head size.

        Zeros in queries and keys add nothing to a score; zeros in values give zeros in the output.
        """
        *shape, size = value.shape
        if size == width:
            return value
        return self.recorder.make(
            partial(torch.constant_pad_nd, pad=(0, width - size)), (*shape, width), value
        )

    def _run(self, way: str, query: Value, key: Value, rows: CallRows) -> Callable[..., Any]:
        """Return the chosen kernel's function, `forward` or `backward`, for blocks of the given shapes.

        If a call packs several sequences, its function computes one batch entry at a time.
        """
        block = BlockKind(query.shape, key.shape, rows.causal, self.recorder.device, rows.sequences)
        mode = Mode(rows.causal, self.scale, rows.sequences)
        run = partial(getattr(self.kernel.choose(block), way), mode=mode)
        if way == "backward" and self.recorder.device.type == "cuda":
            run = partial(_with_aligned_log_sum_exp, run)
        return run if rows.sequences is None or query.shape[0] == 1 else partial(_each_batch, run)


def take(rows: Rows, value: Value, recorder: Recorder) -> Value:
    """Return the given rows of a value [B, heads, rows, ...]: a slice, or a copy if rows have an index."""
    if rows.index is None:
        return value.cut(None, None, rows.span)
    batch, heads, _, *rest = value.shape
    shape = batch, heads, len(rows.index), *rest
    return recorder.make(partial(torch.index_select, dim=2, index=rows.index), shape, value)


def _with_aligned_log_sum_exp(run: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Sequence[Tensor]:
    """Run a kernel after aligning its last argument, a log-sum-exp, which may be a slice of a tensor."""
    *tensors_before, log_sum_exp = tensors
    return run(*tensors_before, aligned_log_sum_exp(log_sum_exp))


def _each_batch(run: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> list[Tensor]:
    """Run a kernel for each batch entry separately and concatenate the results."""
    results = [run(*parts) for parts in zip(*(tensor.split(1) for tensor in tensors), strict=True)]
    return [torch.cat(parts) for parts in zip(*results, strict=True)]
