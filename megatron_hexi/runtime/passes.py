"""Attention in the heads' layout, forward and backward: the own group's blocks, then the exchange's steps.

The wire works while the kernels do. Heads may come in two halves (`Schedule.halves`): the second half's
queries arrive while the own blocks of the first are computed, and the first half's outputs leave while the
last blocks of the second are. In the backward pass the own blocks are cut in two: one part hides the second
half's gradients and the first keys on their way in, the other the last gradients of keys on their way home
and the first half's gradients of queries on their way out.

Shape letters: G tokens of the group, B batch, h and k the rank's own query and KV heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.runtime.all_to_all import Moving, heads_to_tokens
from megatron_hexi.runtime.blocks import BlockAttention, Merger
from megatron_hexi.runtime.exchange import GradientReturn, KeyExchange
from megatron_hexi.runtime.kernels import Kernel
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
    schedule = layer.schedule
    query, key, value = (_heads_first(part) for (part,) in arriving[0].wait())
    keys = _side_by_side(key, value) if schedule.steps or len(arriving) > 1 else None
    if keys is not None and len(arriving) > 1:
        # The buffer that arrived is not kept: its queries are copied to the others.
        key, value = _apart(keys, query.shape[3])
    exchange = KeyExchange(keys, schedule, layer.domain_group, layer.window) if keys is not None else ()
    halves = layer.own_halves()
    own, leaving = [], []
    for number, spans in enumerate(schedule.spans_in_two if len(arriving) > 1 else [schedule.spans]):
        if number > 0:
            query = torch.cat([query, _heads_first(arriving[number].wait()[0][0])], dim=1)
        output, log_sum_exp = _own_forward(
            BlockAttention(layer.kernel, spans, layer.scale), schedule, query, key, value
        )
        if sinks is not None:
            output, log_sum_exp = add_sinks(output, log_sum_exp, sinks[halves[number]])
        if not schedule.steps:
            output = output.to(query.dtype)
            leaving.append(layer.leave(number, output))
        own.append((output, log_sum_exp))
    output, log_sum_exp = (_cat(parts) for parts in zip(*own, strict=True))
    if not schedule.steps:
        return (query, key, value, output, log_sum_exp), leaving
    merger = Merger(output, log_sum_exp)
    output = output.to(query.dtype)
    for step, part, received in exchange:
        for heads, spans in part.pieces:
            if received is not None:
                far = _apart(received, query.shape[3])
                blocks = BlockAttention(layer.kernel, spans, layer.scale)
                for block, out, lse in blocks.forward(query[:, slice(*part.heads)], *far, step.blocks):
                    merger.add(heads, block.queries, out, lse)
            if step is not schedule.steps[-1]:
                continue
            # What is done leaves, while the rest of the last step is computed.
            for half in halves[len(leaving) :]:
                if half.stop <= heads[1]:
                    output[:, half] = merger.output[:, half]
                    leaving.append(layer.leave(len(leaving), output[:, half]))
    return (query, key, value, output, merger.log_sum_exp), leaving


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
    schedule = layer.schedule
    query, key, value, output, log_sum_exp = saved
    if not schedule.steps:
        return _own_backward(layer, arriving, saved, sinks)
    head_dim = key.shape[3]
    grad_output = _heads_first(arriving[0].wait()[0][0])
    first, last = (BlockAttention(layer.kernel, spans, layer.scale) for spans in schedule.spans_in_two)
    own = (*schedule.own, *schedule.own_beside)
    own_keys = _side_by_side(key, value)
    exchange = KeyExchange(own_keys, schedule, layer.domain_group, layer.window)
    # Parts are added up in fp32 (fp64 for fp64), so that the number of groups costs no precision.
    wide = log_sum_exp.dtype
    grad_query = torch.zeros_like(query, dtype=wide)
    grad_keys = torch.zeros_like(own_keys, dtype=wide)
    own_sums = grad_query, *_apart(grad_keys, head_dim)
    returns = GradientReturn(grad_keys, schedule, layer.domain_group, layer.window)
    # Every step hides the transfers of its neighbours. Before the first there are only the own blocks to hide
    # its keys and values behind, and after the last only the own blocks to hide its gradients.
    first.add_backward(own_sums, grad_output, query, key, value, output, log_sum_exp, own)
    if len(arriving) > 1:
        grad_output = torch.cat([grad_output, _heads_first(arriving[1].wait()[0][0])], dim=1)
    for step, part, received in exchange:
        gradient = None
        if received is not None:
            sums = torch.zeros_like(received, dtype=wide)
            rows = slice(None), slice(*part.heads)
            BlockAttention(layer.kernel, part.spans, layer.scale).add_backward(
                (grad_query[rows], *_apart(sums, head_dim)),
                grad_output[rows],
                query[rows],
                *_apart(received, head_dim),
                output[rows],
                log_sum_exp[rows],
                step.blocks,
            )
            gradient = sums.to(query.dtype)
        returns.post(step, part, gradient, like=own_keys)
    *early, late = layer.own_halves()
    leaving = [layer.leave(0, grad_query[:, half].to(query.dtype)) for half in early]
    last.add_backward(own_sums, grad_output, query, key, value, output, log_sum_exp, own)
    returns.finish()
    grad_own = _apart(grad_keys.to(query.dtype), head_dim)
    leaving.append(layer.leave(len(leaving), grad_query[:, late].to(query.dtype), *grad_own))
    return leaving, None if sinks is None else sinks_gradient(grad_output, output, log_sum_exp, sinks)


def _own_forward(
    blocks: BlockAttention, schedule: Schedule, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the own group's blocks, of some heads; in fp32 where they were merged."""
    batch, _, tokens, _ = query.shape
    heads = blocks.queries[1] - blocks.queries[0]
    computed = blocks.forward(query, key, value, schedule.own)
    if heads and len(schedule.own) == 1:
        ((_, output, log_sum_exp),) = computed
    else:
        output = query.new_empty(batch, heads, tokens, value.shape[3])
        wide = torch.promote_types(query.dtype, torch.float32)
        log_sum_exp = query.new_empty(batch, heads, tokens, dtype=wide)
        for block, out, lse in computed:
            rows = slice(*block.queries)
            output[:, :, rows], log_sum_exp[:, :, rows] = out, lse
    if not schedule.own_beside:
        return output, log_sum_exp
    merger = Merger(output, log_sum_exp)
    for block, out, lse in blocks.forward(query, key, value, schedule.own_beside):
        merger.add((0, heads), block.queries, out, lse)
    return merger.output, merger.log_sum_exp


def _own_backward(
    layer: Layer, arriving: Sequence[Moving], saved: Saved, sinks: Tensor | None
) -> tuple[list[Moving], Tensor | None]:
    """`attend_backward` where there is no other group."""
    schedule = layer.schedule
    _, key, _, output, log_sum_exp = saved
    arrived: list[Tensor] = []
    leaving: list[Moving] = []
    grad_keys: list[Sequence[Tensor]] = []
    for number, spans in enumerate(schedule.spans_in_two if len(arriving) > 1 else [schedule.spans]):
        arrived.append(_heads_first(arriving[number].wait()[0][0]))
        blocks = BlockAttention(layer.kernel, spans, layer.scale)
        grad_query, *own = _own_gradients(blocks, schedule, _cat(arrived), saved)
        grad_keys.append(own)
        if number + 1 < len(arriving):
            leaving.append(layer.leave(number, grad_query))
    sums = [_both(halves, key.shape[1]) for halves in zip(*grad_keys, strict=True)]
    leaving.append(layer.leave(len(leaving), grad_query, *sums))
    return leaving, None if sinks is None else sinks_gradient(_cat(arrived), output, log_sum_exp, sinks)


def _own_gradients(
    blocks: BlockAttention, schedule: Schedule, grad_output: Tensor, saved: Saved
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value by the own group's blocks, of the blocks' heads."""
    query, key, value, _, log_sum_exp = saved
    own = (*schedule.own, *schedule.own_beside)
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
