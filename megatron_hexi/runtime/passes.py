"""Attention in the heads' layout, forward and backward: the own group's blocks, then the exchange's steps.

Both passes carry out their program (`plan.program`) with tensors; the caller has posted the ways in, and
waits for the ways out. Heads may come in two halves (`Schedule.halves`).

Shape letters: G tokens of the group, B batch, h and k the rank's own query and KV heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.program import Batch, FarBlocks, OwnBlock, Post, Wait
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.runtime.all_to_all import Moving, heads_to_tokens
from megatron_hexi.runtime.blocks import BlockAttention, Merger
from megatron_hexi.runtime.exchange import GradientReturn, KeyExchange
from megatron_hexi.runtime.kernels import Kernel
from megatron_hexi.runtime.ranges import named
from megatron_hexi.runtime.sinks import add_sinks, sinks_gradient


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

    def blocks(self, spans: Sequence[HeadSpan]) -> BlockAttention:
        """Attention of some of the rank's heads."""
        return BlockAttention(self.kernel, spans, self.scale)

    def leave(self, half: int, query: Tensor, *keys: Tensor) -> Moving:
        """Start the way out of a half: of some [B, h, G, D] with query heads, and of some [B, k, G, D]."""
        tables = (self.schedule.halves[half], *(self.schedule.kv for _ in keys))
        parts = [part.permute(2, 0, 1, 3) for part in (query, *keys)]
        return heads_to_tokens(parts, tables, self.schedule, self.a2a_group)

    def own_halves(self) -> list[slice]:
        """The rank's own query heads in each half, counted from its first."""
        own = (half[self.schedule.position] for half in self.schedule.halves)
        ends = itertools.accumulate((stop - start for start, stop in own), initial=0)
        return [slice(*pair) for pair in itertools.pairwise(ends)]


#: What the backward pass needs: query [B, h, G, D], key and value [B, k, G, D], output [B, h, G, D] in the
#: query's type, log-sum-exp [B, h, G].
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def attend(layer: Layer, arriving: Sequence[Moving], sinks: Tensor | None) -> tuple[Saved, list[Moving]]:
    """The forward pass.

    Args:
        layer: what to go by.
        arriving: the halves of the queries; keys and values come with the first.
        sinks: logits of the own heads' sinks [h], or ``None`` for none.

    Returns:
        What the backward pass needs, and the halves of the output on their way out.
    """
    schedule, halves = layer.schedule, layer.own_halves()
    own: list[tuple[Tensor, Tensor]] = []
    leaving: list[Moving] = []
    for operation in named(schedule.program(backward=False, window=layer.window)):
        match operation:
            case Wait(Batch("in", 0)):
                query, key, value = (_heads_first(part) for (part,) in arriving[0].wait())
                if schedule.steps or len(arriving) > 1:
                    keys = _side_by_side(key, value)
                    exchange = KeyExchange(keys, schedule, layer.domain_group)
                if len(arriving) > 1:
                    # The buffer that arrived is not kept: its queries are copied to the others.
                    key, value = _apart(keys, query.shape[3])
            case Wait(Batch("in", half)):
                query = torch.cat([query, _heads_first(arriving[half].wait()[0][0])], dim=1)
            case OwnBlock(first, stop):
                blocks = layer.blocks(schedule.own_spans(operation))
                output, log_sum_exp = _own_forward(blocks, schedule, query, key, value)
                if sinks is not None:
                    output, log_sum_exp = add_sinks(output, log_sum_exp, sinks[halves[first]])
                own.append((output if schedule.steps else output.to(query.dtype), log_sum_exp))
                if stop == 2:
                    output, log_sum_exp = (_cat(parts) for parts in zip(*own, strict=True))
                    if schedule.steps:
                        merger = Merger(output, log_sum_exp)
                        output, log_sum_exp = output.to(query.dtype), merger.log_sum_exp
            case Post(Batch("keys")):
                exchange.post(schedule.part(operation.batch))
            case Wait(Batch("keys")):
                received = exchange.wait(schedule.part(operation.batch))
            case FarBlocks(step, _, piece):
                part = schedule.part(operation)
                for heads, spans in part.pieces[slice(piece, 1 if piece == 0 else None)]:
                    if received is None:
                        continue
                    far = query[:, slice(*part.heads)], *_apart(received, query.shape[3])
                    for rows, out, lse in layer.blocks(spans).forward(*far, schedule.steps[step].calls):
                        merger.add(heads, rows, out, lse)
            case Post(Batch("out", half)):
                if schedule.steps:
                    output[:, halves[half]] = merger.output[:, halves[half]]
                done = output[:, halves[half]] if schedule.steps else own[half][0]
                leaving.append(layer.leave(half, done))
    return (query, key, value, output, log_sum_exp), leaving


def attend_backward(
    layer: Layer, arriving: Sequence[Moving], saved: Saved, sinks: Tensor | None
) -> tuple[list[Moving], Tensor | None]:
    """The backward pass.

    Args:
        layer: what to go by.
        arriving: the halves of the output's gradient.
        saved: as `attend` returned it.
        sinks: as `attend` took them.

    Returns:
        Gradients on their way out, of the halves of query [B, h, G, D], with the last of key and value too;
        and the gradient of the sinks.
    """
    schedule, halves = layer.schedule, layer.own_halves()
    query, key, value, output, log_sum_exp = saved
    leaving: list[Moving] = []
    apart: list[tuple[Tensor, Tensor, Tensor]] = []
    if schedule.steps:
        own_keys = _side_by_side(key, value)
        exchange = KeyExchange(own_keys, schedule, layer.domain_group)
        # Parts are added up in fp32 (fp64 for fp64), so that the number of groups costs no precision.
        wide = log_sum_exp.dtype
        grad_query, grad_keys = (torch.zeros_like(tensor, dtype=wide) for tensor in (query, own_keys))
        own_sums = grad_query, *_apart(grad_keys, key.shape[3])
        returns = GradientReturn(grad_keys, schedule, layer.domain_group)
    for operation in named(schedule.program(backward=True, window=layer.window)):
        match operation:
            case Wait(Batch("in", 0)):
                grad_output = _heads_first(arriving[0].wait()[0][0])
            case Wait(Batch("in", half)):
                grad_output = torch.cat([grad_output, _heads_first(arriving[half].wait()[0][0])], dim=1)
            case OwnBlock():
                blocks = layer.blocks(schedule.own_spans(operation))
                if schedule.steps:
                    own = (*schedule.own_calls, *schedule.own_beside_calls)
                    blocks.add_backward(own_sums, grad_output, *saved, own)
                else:
                    apart.append(_own_gradients(blocks, schedule, grad_output, saved))
            case Post(Batch("keys")):
                exchange.post(schedule.part(operation.batch))
            case Wait(Batch("keys")):
                received, gradient = exchange.wait(schedule.part(operation.batch)), None
            case FarBlocks(step) if received is not None:
                part = schedule.part(operation)
                sums = torch.zeros_like(received, dtype=wide)
                heads = slice(None), slice(*part.heads)
                layer.blocks(part.spans).add_backward(
                    (grad_query[heads], *_apart(sums, key.shape[3])),
                    grad_output[heads],
                    query[heads],
                    *_apart(received, key.shape[3]),
                    output[heads],
                    log_sum_exp[heads],
                    schedule.steps[step].calls,
                )
                gradient = sums.to(query.dtype)
            case Post(Batch("gradients")):
                returns.post(schedule.part(operation.batch), gradient, like=own_keys)
            case Wait(Batch("gradients")):
                returns.wait(schedule.part(operation.batch))
            case Post(Batch("out", half)):
                done = grad_query[:, halves[half]].to(query.dtype) if schedule.steps else apart[half][0]
                keys: Sequence[Tensor] = ()
                if half == len(halves) - 1 and schedule.steps:
                    keys = _apart(grad_keys.to(query.dtype), key.shape[3])
                elif half == len(halves) - 1:
                    keys = [_both(parts, key.shape[1]) for parts in list(zip(*apart, strict=True))[1:]]
                leaving.append(layer.leave(half, done, *keys))
    return leaving, None if sinks is None else sinks_gradient(grad_output, output, log_sum_exp, sinks)


def _own_forward(
    blocks: BlockAttention, schedule: Schedule, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the own group's blocks, of some heads; in fp32 where they were merged."""
    batch, _, tokens, _ = query.shape
    heads = blocks.queries[1] - blocks.queries[0]
    computed = blocks.forward(query, key, value, schedule.own_calls)
    if heads and len(schedule.own_calls) == 1:
        ((_, output, log_sum_exp),) = computed
    else:
        output = query.new_empty(batch, heads, tokens, value.shape[3])
        wide = torch.promote_types(query.dtype, torch.float32)
        log_sum_exp = query.new_empty(batch, heads, tokens, dtype=wide)
        for rows, out, lse in computed:
            rows.put(output, out)
            rows.put(log_sum_exp, lse)
    if not schedule.own_beside:
        return output, log_sum_exp
    merger = Merger(output, log_sum_exp)
    for rows, out, lse in blocks.forward(query, key, value, schedule.own_beside_calls):
        merger.add((0, heads), rows, out, lse)
    return merger.output, merger.log_sum_exp


def _own_gradients(
    blocks: BlockAttention, schedule: Schedule, grad_output: Tensor, saved: Saved
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value by the own group's blocks, of the blocks' heads."""
    query, key, value, _, log_sum_exp = saved
    own = (*schedule.own_calls, *schedule.own_beside_calls)
    if blocks.spans and len(own) == 1:
        parts = [grads for _, _, grads in blocks.backward(grad_output, *saved, own)]
        grad_query, grad_key, grad_value = (_cat(grads) for grads in zip(*parts, strict=True))
        return grad_query, grad_key, grad_value
    sums = tuple(torch.zeros_like(tensor, dtype=log_sum_exp.dtype) for tensor in (query, key, value))
    blocks.add_backward((sums[0], sums[1], sums[2]), grad_output, *saved, own)
    ranges = blocks.queries, blocks.kv, blocks.kv
    grad_query, grad_key, grad_value = (
        total[:, slice(*heads)].to(query.dtype) for total, heads in zip(sums, ranges, strict=True)
    )
    return grad_query, grad_key, grad_value


def _both(halves: Sequence[Tensor], heads: int) -> Tensor:
    """Gradients of KV heads from both halves; one KV head that both read is added up in fp32."""
    if sum(half.shape[1] for half in halves) == heads:
        return _cat(halves)
    first, second = halves
    wide = torch.promote_types(first.dtype, torch.float32)
    return (first.to(wide) + second).to(first.dtype)


def _heads_first(part: Tensor) -> Tensor:
    """[G, B, h, D] as kernels take it, [B, h, G, D]; only the strides change."""
    return part.permute(1, 2, 0, 3)


def _cat(halves: Sequence[Tensor]) -> Tensor:
    return halves[0] if len(halves) == 1 else torch.cat(list(halves), dim=1)


def _side_by_side(key: Tensor, value: Tensor) -> Tensor:
    """[B, k, G, D] twice as one contiguous [k, B, G, 2 D]: heads first, the layout that travels."""
    return torch.cat((key, value), dim=3).transpose(0, 1).contiguous()


def _apart(keys: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of keys and values that lie side by side, [B, k, S, D] each."""
    both = keys.transpose(0, 1)
    return both[..., :head_dim], both[..., head_dim:]
