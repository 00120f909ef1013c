"""Attention over a domain: uneven in tokens, heads and groups, exact as on one device.

The way of a token through one layer:

    own tokens, all heads  --all-to-all-->  own heads, the group's tokens
        block of the own group, while keys and values of the next group arrive
        one block after another against the other groups' keys, merged in fp32
    own heads, the group's tokens  --all-to-all-->  own tokens, all heads

The backward walks the same way back: the output's gradient in, keys and values exchanged again (they
are not kept), their gradients sent to the owners, all three gradients back to the tokens' layout.

The wire works while the kernels do. Heads may come in two halves (`Schedule.halves`): the second half's
queries arrive while the own block of the first is computed, and the first half's outputs leave while the
last block of the second is. In the backward pass the own block is cut in two: one part hides the second
half's gradients and the first keys on their way in, the other the last gradients of keys on their way home
and the first half's gradients of queries on their way out.

Shape letters: T tokens of the shard, G tokens of the group, B batch, H query heads, K KV heads, h and k
the rank's own of these, D head size, P ranks of the domain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range, Workload
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.plan.traffic import exchanges_heads
from megatron_hexi.runtime.agreement import agree_on_shapes
from megatron_hexi.runtime.all_to_all import (
    HeadTable,
    Moving,
    heads_to_tokens,
    join_heads,
    tokens_to_heads,
)
from megatron_hexi.runtime.blocks import BlockAttention, Merger
from megatron_hexi.runtime.exchange import GradientReturn, KeyExchange
from megatron_hexi.runtime.kernels import Kernel, select_kernel


@dataclass
class DomainAttention:
    """What one rank needs to compute attention under a plan; everything here is derived from it.

    Swapping the plan means replacing this object.

    Args:
        workload: the model and sequence of the plan.
        schedule: this rank's split tables.
        domain_group: the ranks of the domain, in rank order.
        a2a_group: the ranks of its A2A group, in rank order.
        window: exchange steps under way ahead of the one in use.
        kernel_name: a kernel's name, or ``auto``.
    """

    workload: Workload
    schedule: Schedule
    domain_group: dist.ProcessGroup
    a2a_group: dist.ProcessGroup
    window: int = 1
    kernel_name: str = "auto"
    _agreed: set[tuple[int, ...]] = field(default_factory=set, repr=False)
    _kernels: dict[tuple[torch.device, torch.dtype, int], Kernel] = field(default_factory=dict, repr=False)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Attention of the rank's own tokens.

        Args:
            query: [T, B, H, D].
            key: [T, B, K, D].
            value: [T, B, K, D].
            scale: softmax scale; 1 / sqrt(D) if not given.

        Returns:
            [T, B, H, D].

        Raises:
            PlanError: the tensors are not those of the plan, or another rank's differ; on every rank.
            PlatformError: no kernel takes such tensors.
        """
        agree_on_shapes(self.workload, self.schedule, (query, key, value), self.domain_group, self._agreed)
        scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
        output: Tensor = _DomainAttentionFunction.apply(query, key, value, self, scale)
        return output

    def kernel(self, tensor: Tensor) -> Kernel:
        """The kernel for tensors of this kind, [..., D]; chosen once, for it looks at what is installed."""
        kind = (tensor.device, tensor.dtype, tensor.shape[-1])
        if kind not in self._kernels:
            self._kernels[kind] = select_kernel(self.kernel_name, *kind)
        return self._kernels[kind]

    def to_heads(self, parts: Sequence[Tensor], tables: Sequence[HeadTable]) -> Moving:
        """From the tokens' layout to the heads': [T, B, heads, D] to [G, B, own heads, D].

        Args:
            parts: tensors of all heads.
            tables: the heads of each member that travel, for each tensor.
        """
        if not exchanges_heads(self.schedule):
            return Moving(None, [[part] for part in parts])
        return tokens_to_heads(parts, tables, self.schedule, self.a2a_group)

    def to_tokens(self, parts: Sequence[Tensor], tables: Sequence[HeadTable]) -> Moving:
        """The way back, [G, B, own heads, D] to pieces of [T, B, heads, D]; arguments as of `to_heads`."""
        if not exchanges_heads(self.schedule):
            return Moving(None, [[part] for part in parts])
        return heads_to_tokens(parts, tables, self.schedule, self.a2a_group)


class _DomainAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, domain: DomainAttention, scale: float
    ) -> Tensor:
        schedule = domain.schedule
        ctx.domain, ctx.scale = domain, scale
        if not schedule.group_tokens:  # nobody sends to this group or asks it for anything
            ctx.save_for_backward(query, key, value)
            return torch.empty_like(query)
        first, *others = schedule.halves
        arriving = [domain.to_heads((query, key, value), (first, schedule.kv, schedule.kv))]
        arriving += [domain.to_heads((query,), (half,)) for half in others]
        saved, leaving = _attend(domain, arriving, scale)
        ctx.save_for_backward(*saved)
        return _joined([half.wait()[0] for half in leaving], schedule.halves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        domain: DomainAttention = ctx.domain
        schedule = domain.schedule
        if not schedule.group_tokens:
            return *(torch.empty_like(tensor) for tensor in ctx.saved_tensors), None, None
        arriving = [domain.to_heads(grads, (half,)) for half in schedule.halves]
        leaving = _attend_backward(domain, arriving, ctx.saved_tensors, ctx.scale)
        queries = [half.wait() for half in leaving]
        _, key, value = queries[-1]
        grad_query = _joined([half[0] for half in queries], schedule.halves)
        return grad_query, _joined([key], [schedule.kv]), _joined([value], [schedule.kv]), None, None


def _attend(
    domain: DomainAttention, arriving: Sequence[Moving], scale: float
) -> tuple[tuple[Tensor, ...], list[Moving]]:
    """Attention in the heads' layout.

    Args:
        domain: whose.
        arriving: the halves of the queries; keys and values come with the first.
        scale: softmax scale.

    Returns:
        What the backward pass needs: query [B, h, G, D], key and value [B, k, G, D], output [B, h, G, D] in
        the query's type, log-sum-exp [B, h, G]. And the halves of the output on their way out.
    """
    schedule = domain.schedule
    query, key, value = (_heads_first(part) for (part,) in arriving[0].wait())
    keys = _side_by_side(key, value)
    if len(arriving) > 1:  # the buffer that arrived is not kept: its queries are copied to the others
        key, value = _apart(keys, keys.shape[2], query.shape[3])
    kernel = domain.kernel(query)
    exchange = KeyExchange(keys, schedule, domain.domain_group, domain.window)
    halves = _own_halves(schedule)
    own, leaving = [], []
    for number, spans in enumerate(schedule.spans_in_two if len(arriving) > 1 else [schedule.spans]):
        if number > 0:
            query = torch.cat([query, _heads_first(arriving[number].wait()[0][0])], dim=1)
        own.append(BlockAttention(kernel, spans, scale).forward(query, key, value, schedule.causal))
        if not schedule.steps:
            leaving.append(_leave(domain, number, own[-1][0]))
    output, log_sum_exp = (_cat(parts) for parts in zip(*own, strict=True))
    if not schedule.steps:
        return (query, key, value, output, log_sum_exp), leaving
    merger = Merger(output, log_sum_exp)
    for step, part, received in exchange:
        for heads, spans in part.pieces:
            if received is not None:
                blocks = BlockAttention(kernel, spans, scale)
                for block in step.blocks:
                    far_key, far_value = _apart(received, block.keys, query.shape[3])
                    rows = query[:, slice(*part.heads), slice(*block.queries)]
                    merger.add(heads, block.queries, *blocks.forward(rows, far_key, far_value, causal=False))
            if step is not schedule.steps[-1]:
                continue
            # What is done leaves, while the rest of the last step is computed.
            for half in halves[len(leaving) :]:
                if half.stop <= heads[1]:
                    output[:, half] = merger.output[:, half]
                    leaving.append(_leave(domain, len(leaving), output[:, half]))
    return (query, key, value, output, merger.log_sum_exp), leaving


def _attend_backward(
    domain: DomainAttention, arriving: Sequence[Moving], forward: tuple[Tensor, ...], scale: float
) -> list[Moving]:
    """Gradients on their way out: of the halves of query [B, h, G, D]; with the last of key and value too.

    Args:
        domain: whose.
        arriving: the halves of the output's gradient.
        forward: what `_attend` says that the backward pass needs.
        scale: softmax scale.
    """
    schedule = domain.schedule
    query, key, value, output, log_sum_exp = forward
    if not schedule.steps:
        return _own_backward(domain, arriving, forward, scale)
    kernel, head_dim = domain.kernel(query), key.shape[3]
    grad_output = _heads_first(arriving[0].wait()[0][0])
    first, last = (BlockAttention(kernel, spans, scale) for spans in schedule.spans_in_two)
    own_keys = _side_by_side(key, value)
    exchange = KeyExchange(own_keys, schedule, domain.domain_group, domain.window)
    # Parts are added up in fp32 (fp64 for fp64), so that the number of groups costs no precision.
    wide = log_sum_exp.dtype
    grad_query = torch.zeros_like(query, dtype=wide)
    grad_keys = torch.zeros_like(own_keys, dtype=wide)
    own_sums = grad_query, *_apart(grad_keys, grad_keys.shape[2], head_dim)
    returns = GradientReturn(grad_keys, schedule, domain.domain_group, domain.window)
    # Every step hides the transfers of its neighbours. Before the first there is only the own block to hide
    # its keys and values behind, and after the last only the own block to hide its gradients.
    first.add_backward(own_sums, grad_output, query, key, value, output, log_sum_exp, schedule.causal)
    if len(arriving) > 1:
        grad_output = torch.cat([grad_output, _heads_first(arriving[1].wait()[0][0])], dim=1)
    for step, part, received in exchange:
        gradient = None
        if received is not None:
            sums = torch.zeros_like(received, dtype=wide)
            blocks = BlockAttention(kernel, part.spans, scale)
            for block in step.blocks:
                far_key, far_value = _apart(received, block.keys, head_dim)
                rows = slice(None), slice(*part.heads), slice(*block.queries)
                blocks.add_backward(
                    (grad_query[rows], *_apart(sums, block.keys, head_dim)),
                    grad_output[rows],
                    query[rows],
                    far_key,
                    far_value,
                    output[rows],
                    log_sum_exp[rows],
                    causal=False,
                )
            gradient = sums.to(query.dtype)
        returns.post(step, part, gradient, like=own_keys)
    *early, late = _own_halves(schedule)
    leaving = [_leave(domain, 0, grad_query[:, half].to(query.dtype)) for half in early]
    last.add_backward(own_sums, grad_output, query, key, value, output, log_sum_exp, schedule.causal)
    returns.finish()
    grad_own = _apart(grad_keys.to(query.dtype), grad_keys.shape[2], head_dim)
    return [*leaving, _leave(domain, len(leaving), grad_query[:, late].to(query.dtype), *grad_own)]


def _own_backward(
    domain: DomainAttention, arriving: Sequence[Moving], forward: Sequence[Tensor], scale: float
) -> list[Moving]:
    """`_attend_backward` where there is no other group: only a KV head that both halves read is added up."""
    schedule, kernel = domain.schedule, domain.kernel(forward[0])
    query, key, value, output, log_sum_exp = forward
    grad_output: Tensor | None = None
    leaving: list[Moving] = []
    grad_keys: list[Sequence[Tensor]] = []
    for number, spans in enumerate(schedule.spans_in_two if len(arriving) > 1 else [schedule.spans]):
        here = _heads_first(arriving[number].wait()[0][0])
        grad_output = here if grad_output is None else torch.cat([grad_output, here], dim=1)
        blocks = BlockAttention(kernel, spans, scale)
        grad_query, *own = blocks.backward(
            grad_output, query, key, value, output, log_sum_exp, schedule.causal
        )
        grad_keys.append(own)
        if number + 1 < len(arriving):
            leaving.append(_leave(domain, number, grad_query))
    sums = [_both(halves, key.shape[1]) for halves in zip(*grad_keys, strict=True)]
    return [*leaving, _leave(domain, len(leaving), grad_query, *sums)]


def _both(halves: Sequence[Tensor], heads: int) -> Tensor:
    """Gradients of KV heads from both halves; one KV head that both read is added up in fp32."""
    if sum(half.shape[1] for half in halves) == heads:
        return _cat(halves)
    first, second = halves
    wide = torch.promote_types(first.dtype, torch.float32)
    return (first.to(wide) + second).to(first.dtype)


def _leave(domain: DomainAttention, half: int, query: Tensor, *keys: Tensor) -> Moving:
    """Start the way out of a half of something with query heads [B, h, G, D], and of [B, k, G, D]."""
    schedule = domain.schedule
    tables = (schedule.halves[half], *(schedule.kv for _ in keys))
    return domain.to_tokens([part.permute(2, 0, 1, 3) for part in (query, *keys)], tables)


def _joined(halves: Sequence[Sequence[Tensor]], tables: Sequence[HeadTable]) -> Tensor:
    """What has come back of all halves, [T, B, H, D]."""
    pieces = [piece for half in halves for piece in half]
    return join_heads(pieces, [heads for table in tables for heads in table]).contiguous()


def _own_halves(schedule: Schedule) -> list[slice]:
    """The rank's own query heads in each half, counted from its first."""
    ends = itertools.accumulate((stop - start for start, stop in _own(schedule)), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _own(schedule: Schedule) -> list[Range]:
    return [half[schedule.position] for half in schedule.halves]


def _heads_first(part: Tensor) -> Tensor:
    """[G, B, h, D] as kernels take it, [B, h, G, D]; only the strides change."""
    return part.permute(1, 2, 0, 3)


def _cat(halves: Sequence[Tensor]) -> Tensor:
    return halves[0] if len(halves) == 1 else torch.cat(list(halves), dim=1)


def _side_by_side(key: Tensor, value: Tensor) -> Tensor:
    """[B, k, G, D] twice as one contiguous [k, B, G, 2 D]: heads first, the layout that travels."""
    return torch.cat((key, value), dim=3).transpose(0, 1).contiguous()


def _apart(keys: Tensor, tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of the first tokens' keys and values, [B, k, S, D] each."""
    prefix = keys[:, :, :tokens].transpose(0, 1)
    return prefix[..., :head_dim], prefix[..., head_dim:]
