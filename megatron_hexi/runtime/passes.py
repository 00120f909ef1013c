"""The forward and backward pass of an attention layer, compiled from its program.

Both passes follow their program (`plan.program`). Query heads may be sent in two halves (`Schedule.halves`),
which stay separate: kernels read the received buffers, and their results are summed (`sums`) in the buffer to
send.

An attention sink is a logit for each head that takes part in the softmax and has no value: one more key whose
value is 0. The merged log-sum-exp of blocks begins with the sink's logit. With the merged log-sum-exp and
output, the kernels' gradients of query, key and value are exact. The gradient of a sink is minus the sum of
`exp(sink - lse) dO·O` over the rows of its head (StreamingLLM, arXiv 2309.17453).

Shape letters: T tokens of the shard, L rows of the shard with padding, G tokens of the group, B batch, H
query heads and K KV heads of the layer, h query heads of a half and k KV heads of the rank, D size of a head,
Dv size of a head's value.

Latent columns that are exchanged in place of keys and values (`latent`) are treated as one KV head that all
query heads read: its "keys" are the latent columns, its "values" the rotary columns. The keys and values of
each block are computed from these columns for the heads of the block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.blocks import Call
from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.program import Batch, FarBlocks, OwnBlock, Post, Wait
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.runtime.all_to_all import Arriving, Leaving, arrive
from megatron_hexi.runtime.attention_blocks import BlockAttention, Queries
from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.compiled import CompiledPass, Recorder, Shape, Value
from megatron_hexi.runtime.exchange import GradientReturn, KVExchange
from megatron_hexi.runtime.fused.plain import MOST_TERMS
from megatron_hexi.runtime.kernels import KernelDispatch
from megatron_hexi.runtime.latent import Expansion, LatentSizes
from megatron_hexi.runtime.sums import RowSum


class Inputs(NamedTuple):
    """The kind of tensors for which a layer is compiled: shapes, type and device.

    Args:
        query: shape of the query, [L, B, H, D].
        key: shape of the key, [L, B, K, D]; with `matrix`, of the latent columns, [L, B, 1, C].
        value: shape of the value, [L, B, K, Dv]; with `matrix`, of the rotary columns, [L, B, 1, R].
        padding: number of padding rows after the tokens, L - T.
        matrix: shape [H (N + V), C] of the matrix that computes keys and values from latent columns;
            ``None``: latent columns are not exchanged.
    """

    query: Shape
    key: Shape
    value: Shape
    dtype: torch.dtype
    device: torch.device
    has_sinks: bool = False
    padding: int = 0
    matrix: Shape | None = None

    @classmethod
    def from_tensors(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        padding: int = 0,
        matrix: Tensor | None = None,
    ) -> Self:
        """Return the kind of the given tensors."""
        return cls(
            *(query.shape, key.shape, value.shape, query.dtype, query.device),
            has_sinks=sinks is not None,
            padding=padding,
            matrix=None if matrix is None else matrix.shape,
        )

    @property
    def head_sizes(self) -> LatentSizes | None:
        """Sizes of a head that is computed from latent columns; ``None`` without a matrix."""
        if self.matrix is None:
            return None
        rotary = self.value[3]
        plain = self.query[3] - rotary
        return LatentSizes(plain, rotary, self.matrix[0] // self.query[2] - plain)

    @property
    def output(self) -> Shape:
        """Shape of the output, [L, B, H, Dv]."""
        return *self.query[:3], self.head_sizes.value if self.head_sizes else self.value[3]

    @property
    def widest(self) -> int:
        """The larger of the sizes of a head's key and value, for which a kernel is chosen."""
        return max(self.query[3], self.output[3])


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The compiled passes of attention for one plan, mask and kind of tensors; compiled on first use.

    Args:
        a2a_group: process group of the rank's A2A group, in rank order.
        window: number of exchange steps in flight ahead of the step in use.
    """

    schedule: Schedule
    kernel: KernelDispatch
    scale: float
    domain_group: dist.ProcessGroup
    a2a_group: dist.ProcessGroup
    window: int
    inputs: Inputs

    @cached_property
    def forward(self) -> CompiledPass:
        """The forward pass: query, key, value, sinks, matrix to output [L, B, H, Dv] and saved tensors."""
        return _compile_forward(self)

    @cached_property
    def backward(self) -> CompiledPass:
        """The backward pass: the output's gradient, saved tensors, sinks, matrix to five gradients."""
        return _compile_backward(self)

    def arriving(self, recorder: Recorder, half: int, query: Value, *keys: Value) -> Arriving:
        """Start the all-to-all to the heads' layout of one half of the query heads, and of KV heads."""
        tokens = [tensor.cut((0, self.schedule.tokens)) for tensor in (query, *keys)]
        tables = self.schedule.halves[half], *(self.schedule.kv for _ in keys)
        return Arriving(recorder, tokens, tables, self.schedule, self.a2a_group)

    def leaving(self, recorder: Recorder, half: int, query: RowSum, *keys: RowSum) -> Leaving:
        """Start the all-to-all back to the tokens' layout of one half of the query heads, and of KV heads."""
        tables = self.schedule.halves[half], *(self.schedule.kv for _ in keys)
        return Leaving(recorder, (query, *keys), tables, self.schedule, self.a2a_group)

    @property
    def has_few_groups(self) -> bool:
        """Whether at most `MOST_TERMS` groups contribute terms to a sum."""
        return len(self.schedule.steps) < MOST_TERMS

    @cached_property
    def own_halves(self) -> list[Range]:
        """Range of the rank's query heads in each half, counted from the rank's first query head."""
        heads = (half[self.schedule.position] for half in self.schedule.halves)
        ends = itertools.accumulate((stop - start for start, stop in heads), initial=0)
        return list(itertools.pairwise(ends))

    def own_spans(self, operation: OwnBlock) -> Iterator[tuple[int, list[HeadSpan]]]:
        """Yield each half with its spans of heads in an own-block operation, from the rank's first head."""
        return self._by_half(self.schedule.own_spans(operation))

    def far_spans(self, operation: FarBlocks) -> Iterator[tuple[int, list[HeadSpan]]]:
        """Yield each half with its spans of heads in a part of a step, from the part's first KV head."""
        part, piece = self.schedule.part(operation), operation.piece
        first = part.heads[0]
        return self._by_half(
            HeadSpan((span.queries[0] + first, span.queries[1] + first), span.kv)
            for spans in part.pieces[slice(piece, 1 if piece == 0 else None)]
            for span in spans
        )

    def _by_half(self, spans: Iterable[HeadSpan]) -> Iterator[tuple[int, list[HeadSpan]]]:
        for half, alike in itertools.groupby(spans, self._half_of):
            yield half, list(alike)

    def _half_of(self, span: HeadSpan) -> int:
        ends = [stop for _, stop in self.own_halves]
        return next(half for half, end in enumerate(ends) if span.queries[1] <= end)

    def expansion(self, recorder: Recorder, matrix: Value) -> Expansion | None:
        """Return the `Expansion` of latent columns to keys and values; ``None`` without exchanged columns."""
        sizes, first = self.inputs.head_sizes, self.schedule.heads[self.schedule.position][0]
        return Expansion(recorder, matrix, sizes, first) if sizes else None

    def own_sinks(self, sinks: Value, half: int) -> Value:
        """Return the slice of sinks, or of their gradients, for the rank's query heads in a half."""
        return sinks.cut(self.schedule.halves[half][self.schedule.position])


def _compile_forward(layer: AttentionLayer) -> CompiledPass:
    schedule, inputs, heads = layer.schedule, layer.inputs, layer.own_halves
    recorder = Recorder(inputs.dtype, inputs.device)
    blocks = BlockAttention(recorder, layer.kernel, layer.scale)
    *tensors, sinks, matrix = recorder.inputs(*inputs[:3], inputs.query[2:3], inputs.matrix or ())
    expansion = layer.expansion(recorder, matrix)
    arriving: list[Arriving] = []
    queries: list[Queries] = []
    sums: list[RowSum] = []
    leaving: list[Leaving] = []
    parts: Sequence[Value] = ()
    for operation in schedule.program(backward=False, window=layer.window):
        recorder.begin(operation)
        computed: Iterable[tuple[int, list[HeadSpan]]] = ()
        match operation:
            case Post(Batch("in", half)):
                arriving.append(layer.arriving(recorder, half, *(tensors[: 1 if half else 3])))
            case Wait(Batch("in", half)):
                query, *both = arriving[half].wait()
                if half == 0:
                    key, value = both
                    if schedule.steps:
                        exchange = KVExchange(recorder, key, value, schedule, layer.domain_group)
                queries.append(Queries(heads[half], (query,)))
                logits = layer.own_sinks(sinks, half) if inputs.has_sinks else None
                shape = *query.shape[:3], inputs.output[3]
                sums.append(RowSum(recorder, shape, few=layer.has_few_groups, weighed=True, sinks=logits))
            case OwnBlock():
                keys, calls = (key, value), (*schedule.own_calls, *schedule.own_beside_calls)
                computed = layer.own_spans(operation)
            case Post(Batch("keys")):
                exchange.post(schedule.part(operation.batch))
            case Wait(Batch("keys")):
                received = exchange.wait(schedule.part(operation.batch))
            case FarBlocks(step) if received is not None:
                keys, calls = exchange.apart(received, are_read=True), schedule.steps[step].calls
                computed = layer.far_spans(operation)
            case Post(Batch("out", half)):
                leaving.append(layer.leaving(recorder, half, sums[half]))
            case Wait(Batch("out", half)):
                parts = arrive(recorder, leaving, half, inputs.padding, parts)
        for half, spans in computed:
            made = keys
            if expansion is not None:
                spans, *expanded = expansion.keys(spans, *keys)
                made = expanded[0], expanded[1]
            for block_heads, rows, out, lse in blocks.forward(queries[half], *made, spans, calls):
                sums[half].add(queries[half].within(block_heads), rows, out, lse)
    (output,), written = parts, [half.written[0] for half in leaving]
    outputs, log_sum_exps = zip(*written, strict=True)
    return recorder.compile(
        output, key, value, *(half.tensors[0] for half in queries), *outputs, *log_sum_exps
    )


def _compile_backward(layer: AttentionLayer) -> CompiledPass:
    schedule, inputs, heads = layer.schedule, layer.inputs, layer.own_halves
    recorder, count = Recorder(inputs.dtype, inputs.device), len(heads)
    blocks = BlockAttention(recorder, layer.kernel, layer.scale)
    shapes = inputs.output, *layer.forward.shapes[1:], inputs.query[2:3], inputs.matrix or ()
    output_grad, key, value, *saved, sinks, matrix = recorder.inputs(*shapes)
    expansion = layer.expansion(recorder, matrix)
    of_half = [saved[half::count] for half in range(count)]  # query, output, log-sum-exp
    few = layer.has_few_groups
    sums = [RowSum(recorder, query.shape, few=few) for query, _, _ in of_half]
    own_sums = RowSum(recorder, key.shape, few=few), RowSum(recorder, value.shape, few=few)
    grad_sinks = grad_matrix = None
    arriving: list[Arriving] = []
    queries: list[Queries] = []
    leaving: list[Leaving] = []
    parts: Sequence[Value] = ()
    if schedule.steps:
        exchange = KVExchange(recorder, key, value, schedule, layer.domain_group)
        returns = GradientReturn(recorder, *own_sums, exchange, schedule)

    def compute(
        spans: Iterable[tuple[int, list[HeadSpan]]],
        keys: tuple[Value, Value],
        key_sums: tuple[RowSum, RowSum],
        calls: Sequence[Call],
    ) -> None:
        for half, half_spans in spans:
            made, made_sums = keys, key_sums
            if expansion is not None:
                half_spans, *expanded = expansion.keys(half_spans, *keys)
                made = expanded[0], expanded[1]
                made_sums = RowSum(recorder, made[0].shape), RowSum(recorder, made[1].shape)
            for span, rows, grads in blocks.backward(queries[half], *made, half_spans, calls):
                sums[half].add(queries[half].within(span.queries), rows.queries, grads[0])
                for total, grad in zip(made_sums, grads[1:], strict=True):
                    total.add(span.kv, rows.keys, grad)
            if expansion is not None:
                of_key, of_value = (total.result()[0] for total in made_sums)
                of_columns = expansion.gradients(keys[0], of_key, of_value, half_spans)
                for total, grad in zip(key_sums, of_columns, strict=True):
                    total.add((0, 1), Rows((0, keys[0].shape[2])), grad)

    for operation in schedule.program(backward=True, window=layer.window):
        recorder.begin(operation)
        match operation:
            case Post(Batch("in", half)):
                arriving.append(layer.arriving(recorder, half, output_grad))
            case Wait(Batch("in", half)):
                (grad_output,) = arriving[half].wait()
                queries.append(Queries(heads[half], (grad_output, *of_half[half])))
            case OwnBlock():
                calls = (*schedule.own_calls, *schedule.own_beside_calls)
                compute(layer.own_spans(operation), (key, value), own_sums, calls)
            case Post(Batch("keys")):
                exchange.post(schedule.part(operation.batch))
            case Wait(Batch("keys")):
                received, gradient = exchange.wait(schedule.part(operation.batch)), None
            case FarBlocks(step) if received is not None:
                keys = exchange.apart(received, are_read=True)
                far_sums = RowSum(recorder, keys[0].shape), RowSum(recorder, keys[1].shape)
                compute(layer.far_spans(operation), keys, far_sums, schedule.steps[step].calls)
                gradient = recorder.empty(*received.shape)
                for total, place in zip(far_sums, exchange.apart(gradient), strict=True):
                    total.write(place)
            case Post(Batch("gradients")):
                returns.post(schedule.part(operation.batch), gradient)
            case Wait(Batch("gradients")):
                returns.wait(schedule.part(operation.batch))
            case Post(Batch("out", half)):
                out = [sums[half], *(own_sums if half == count - 1 else ())]
                leaving.append(layer.leaving(recorder, half, *out))
            case Wait(Batch("out", half)):
                parts = arrive(recorder, leaving, half, inputs.padding, parts)
    if inputs.has_sinks:
        grad_sinks = recorder.make(torch.zeros_like, sinks.shape, sinks)
        for half, (grad_output, _, output, log_sum_exp) in enumerate(part.tensors for part in queries):
            logits = layer.own_sinks(sinks, half)
            gradient = recorder.make(sinks_gradient, logits.shape, grad_output, output, log_sum_exp, logits)
            recorder.do(Tensor.copy_, layer.own_sinks(grad_sinks, half), gradient)
    if expansion is not None:
        grad_matrix = expansion.matrix_gradient()
    return recorder.compile(*parts, grad_sinks, grad_matrix)


def sinks_gradient(grad_output: Tensor, output: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks' logits, [h].

    Args:
        grad_output: gradient of the output, [B, h, G, D].
        output: merged output, [B, h, G, D].
        log_sum_exp: merged log-sum-exp including the sinks, [B, h, G].
        sinks: logit of each head's sink, [h].
    """
    wide = log_sum_exp.dtype
    weight = torch.exp(sinks.to(wide)[:, None] - log_sum_exp)
    share = (grad_output.to(wide) * output.to(wide)).sum(dim=3)
    return -(weight * share).sum(dim=(0, 2))
