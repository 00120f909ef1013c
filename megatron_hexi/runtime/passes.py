"""Attention in the heads' layout, forward and backward: the own group's blocks, then the exchange's steps.

Both passes carry out their program (`plan.program`) with tensors; the caller has posted the ways in, and
waits for the ways out. Heads may come in two halves (`Schedule.halves`). Halves stay apart: what arrives is
what kernels read, and what kernels give is added up (`sums`) where it leaves from.

Shape letters: G tokens of the group, B batch, h query heads of a half and k the rank's own KV heads, D head
size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.blocks import Call
from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.program import Batch, FarBlocks, OwnBlock, Post, Wait
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.runtime.all_to_all import Leaving, Moving
from megatron_hexi.runtime.blocks import BlockAttention, Queries
from megatron_hexi.runtime.exchange import GradientReturn, KeyExchange
from megatron_hexi.runtime.fused.terms import MOST_TERMS, Sum
from megatron_hexi.runtime.kernels import Kernel
from megatron_hexi.runtime.ranges import named
from megatron_hexi.runtime.sinks import sinks_gradient
from megatron_hexi.runtime.sums import RowSum


@dataclass(frozen=True)
class Layer:
    """What one call of attention goes by.

    Args:
        schedule: the rank's split tables under the layer's mask.
        kernel: what computes.
        scale: softmax scale.
        domain_group: the ranks of the domain, in rank order.
        a2a_group: the ranks of its A2A group, in rank order.
        window: exchange steps under way ahead of the one in use.
    """

    schedule: Schedule
    kernel: Kernel
    scale: float
    domain_group: dist.ProcessGroup
    a2a_group: dist.ProcessGroup
    window: int

    @property
    def has_few_groups(self) -> bool:
        """Whether no more than `MOST_TERMS` groups have a part in a sum."""
        return len(self.schedule.steps) < MOST_TERMS

    @property
    def blocks(self) -> BlockAttention:
        """What runs the kernel."""
        return BlockAttention(self.kernel, self.scale)

    def leaving(self, half: int, query: RowSum, *keys: RowSum) -> Leaving:
        """Room for a half on its way out: for sums with query heads, and for some with KV heads."""
        sums = (query, *keys)
        tables = (self.schedule.halves[half], *(self.schedule.kv for _ in keys))
        sizes = [one.shape[3] for one in sums]
        return Leaving(query.like, query.shape[0], tables, sizes, self.schedule, self.a2a_group)

    @cached_property
    def own_halves(self) -> list[Range]:
        """The rank's own query heads in each half, counted from its first."""
        own = (half[self.schedule.position] for half in self.schedule.halves)
        ends = itertools.accumulate((stop - start for start, stop in own), initial=0)
        return list(itertools.pairwise(ends))

    def own_spans(self, operation: OwnBlock) -> Iterator[tuple[int, list[HeadSpan]]]:
        """Of each half its heads with which the own block is computed, counted from the rank's first."""
        return self._by_half(self.schedule.own_spans(operation))

    def far_spans(self, operation: FarBlocks) -> Iterator[tuple[int, list[HeadSpan]]]:
        """Of each half its heads of a part of a step, likewise; KV heads count from the part's first."""
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


@dataclass(frozen=True)
class Saved:
    """What the backward pass needs.

    Args:
        key: [B, k, G, D].
        value: likewise.
        queries: of each half, [B, h, G, D].
        outputs: likewise, in the query's type.
        log_sum_exps: likewise, [B, h, G].
    """

    key: Tensor
    value: Tensor
    queries: Sequence[Tensor]
    outputs: Sequence[Tensor]
    log_sum_exps: Sequence[Tensor]


def attend(layer: Layer, arriving: Sequence[Moving], sinks: Tensor | None) -> tuple[Saved, list[Leaving]]:
    """The forward pass.

    Args:
        layer: what to go by.
        arriving: the halves of the queries; keys and values come with the first.
        sinks: logits of the own heads' sinks [h], or ``None`` for none.

    Returns:
        What the backward pass needs, and the halves of the output on their way out.
    """
    schedule, blocks = layer.schedule, layer.blocks
    queries: list[Queries] = []
    sums: list[RowSum] = []
    leaving: list[Leaving] = []
    done: list[Sum] = []
    for operation in named(schedule.program(backward=False, window=layer.window)):
        computed: Iterable[tuple[int, list[HeadSpan]]] = ()
        match operation:
            case Wait(Batch("in", half)):
                query, *both = (_heads_first(part) for part in arriving[half].wait())
                if half == 0:
                    key, value = both
                    if schedule.steps:
                        exchange = KeyExchange(key, value, schedule, layer.domain_group)
                heads = layer.own_halves[half]
                queries.append(Queries(heads, (query,)))
                logits = None if sinks is None else sinks[slice(*heads)]
                shape, few = (*query.shape[:3], value.shape[3]), layer.has_few_groups
                sums.append(RowSum(shape, value, few=few, weighed=True, sinks=logits))
            case OwnBlock():
                keys, calls = (key, value), (*schedule.own_calls, *schedule.own_beside_calls)
                computed = layer.own_spans(operation)
            case Post(Batch("keys")):
                exchange.post(schedule.part(operation.batch))
            case Wait(Batch("keys")):
                received = exchange.wait(schedule.part(operation.batch))
            case FarBlocks(step) if received is not None:
                keys, calls = exchange.apart(received), schedule.steps[step].calls
                computed = layer.far_spans(operation)
            case Post(Batch("out", half)):
                leaving.append(layer.leaving(half, sums[half]))
                done += leaving[half].write([sums[half]])
                leaving[half].start()
        for half, spans in computed:
            for heads, rows, out, lse in blocks.forward(queries[half], *keys, spans, calls):
                sums[half].add(_within(heads, queries[half].heads), rows, out, lse)
    outputs, log_sum_exps = zip(*((one.value, one.log_sum_exp) for one in done), strict=True)
    return Saved(key, value, [half.tensors[0] for half in queries], outputs, log_sum_exps), leaving


def attend_backward(
    layer: Layer, arriving: Sequence[Moving], saved: Saved, sinks: Tensor | None
) -> tuple[list[Leaving], Tensor | None]:
    """The backward pass.

    Args:
        layer: what to go by.
        arriving: the halves of the output's gradient.
        saved: as `attend` returned it.
        sinks: as `attend` took them.

    Returns:
        Gradients on their way out, of the halves of the query, with the last of key and value too; and the
        gradient of the sinks.
    """
    schedule, blocks, key, value = layer.schedule, layer.blocks, saved.key, saved.value
    queries: list[Queries] = []
    leaving: list[Leaving] = []
    few = layer.has_few_groups
    sums = [RowSum(_shape(query), query, few=few) for query in saved.queries]
    own_sums = RowSum(_shape(key), key, few=few), RowSum(_shape(value), value, few=few)
    if schedule.steps:
        exchange = KeyExchange(key, value, schedule, layer.domain_group)
        returns = GradientReturn(*own_sums, exchange, schedule, layer.domain_group)

    def compute(
        spans: Iterable[tuple[int, list[HeadSpan]]],
        keys: tuple[Tensor, Tensor],
        key_sums: tuple[RowSum, RowSum],
        calls: Sequence[Call],
    ) -> None:
        for half, some in spans:
            for span, rows, grads in blocks.backward(queries[half], *keys, some, calls):
                sums[half].add(_within(span.queries, queries[half].heads), rows.queries, grads[0])
                for one, grad in zip(key_sums, grads[1:], strict=True):
                    one.add(span.kv, rows.keys, grad)

    for operation in named(schedule.program(backward=True, window=layer.window)):
        match operation:
            case Wait(Batch("in", half)):
                (grad_output,) = (_heads_first(part) for part in arriving[half].wait())
                of_half = saved.queries[half], saved.outputs[half], saved.log_sum_exps[half]
                queries.append(Queries(layer.own_halves[half], (grad_output, *of_half)))
            case OwnBlock():
                calls = (*schedule.own_calls, *schedule.own_beside_calls)
                compute(layer.own_spans(operation), (key, value), own_sums, calls)
            case Post(Batch("keys")):
                exchange.post(schedule.part(operation.batch))
            case Wait(Batch("keys")):
                received, gradient = exchange.wait(schedule.part(operation.batch)), None
            case FarBlocks(step) if received is not None:
                keys = exchange.apart(received)
                far_sums = RowSum(_shape(keys[0]), key), RowSum(_shape(keys[1]), value)
                compute(layer.far_spans(operation), keys, far_sums, schedule.steps[step].calls)
                gradient = torch.empty_like(received)
                for one, place in zip(far_sums, exchange.apart(gradient), strict=True):
                    one.write(place)
            case Post(Batch("gradients")):
                returns.post(schedule.part(operation.batch), gradient)
            case Wait(Batch("gradients")):
                returns.wait(schedule.part(operation.batch))
            case Post(Batch("out", half)):
                out = [sums[half], *(own_sums if half == len(sums) - 1 else ())]
                leaving.append(layer.leaving(half, *out))
                leaving[half].write(out)
                leaving[half].start()
    if sinks is None:
        return leaving, None
    of_halves = zip(queries, saved.outputs, saved.log_sum_exps, strict=True)
    grads = [
        sinks_gradient(half.tensors[0], out, lse, sinks[slice(*half.heads)]) for half, out, lse in of_halves
    ]
    return leaving, torch.cat(grads)


def _within(heads: Range, half: Range) -> Range:
    """Heads counted from the half's first."""
    return heads[0] - half[0], heads[1] - half[0]


def _shape(tensor: Tensor) -> tuple[int, int, int, int]:
    batch, heads, rows, size = tensor.shape
    return batch, heads, rows, size


def _heads_first(part: Tensor) -> Tensor:
    """[G, B, h, D] as kernels take it, [B, h, G, D]; only the strides change."""
    return part.permute(1, 2, 0, 3)
