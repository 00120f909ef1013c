"""Attention over a domain: uneven in tokens, heads and groups, exact as on one device.

The way of a token through one layer:

    own tokens, all heads  --all-to-all-->  own heads, the group's tokens
        block of the own group, while keys and values of the next group arrive
        one block after another against the other groups' keys, merged in fp32
    own heads, the group's tokens  --all-to-all-->  own tokens, all heads

The backward walks the same way back: the output's gradient in, keys and values exchanged again (they
are not kept), their gradients sent to the owners, all three gradients back to the tokens' layout. The
block of the own group is cut by heads there: one part hides the first keys and values on their way in,
the other the last gradients on their way home.

Shape letters: T tokens of the shard, G tokens of the group, B batch, H query heads, K KV heads, h and k
the rank's own of these, D head size, P ranks of the domain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Workload
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.plan.traffic import exchanges_heads
from megatron_hexi.runtime.agreement import agree_on_shapes
from megatron_hexi.runtime.all_to_all import heads_to_tokens, tokens_to_heads
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

    def to_heads(self, *parts: Tensor) -> list[Tensor]:
        """From the tokens' layout to the heads': [T, B, heads, D] to [G, B, own heads, D].

        One part is a tensor with query heads; three are query, key and value.
        """
        if not exchanges_heads(self.schedule):
            return list(parts)
        return tokens_to_heads(parts, self._tables(parts), self.schedule, self.a2a_group)

    def to_tokens(self, *parts: Tensor) -> list[Tensor]:
        """The way back, [G, B, own heads, D] to [T, B, heads, D]."""
        if not exchanges_heads(self.schedule):
            return list(parts)
        return heads_to_tokens(parts, self._tables(parts), self.schedule, self.a2a_group)

    def _tables(self, parts: tuple[Tensor, ...]) -> list[Any]:
        return [self.schedule.heads, self.schedule.kv, self.schedule.kv][: len(parts)]


class _DomainAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, domain: DomainAttention, scale: float
    ) -> Tensor:
        parts = domain.to_heads(query, key, value)
        # Kernels take heads before tokens; only the strides change.
        query, key, value = (part.permute(1, 2, 0, 3) for part in parts)
        output, log_sum_exp = _attend(domain, query, key, value, scale)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.domain, ctx.scale = domain, scale
        return domain.to_tokens(output.permute(2, 0, 1, 3))[0].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        domain: DomainAttention = ctx.domain
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        (grad_output,) = domain.to_heads(*grads)
        grad_parts = _attend_backward(
            domain, grad_output.permute(1, 2, 0, 3), query, key, value, output, log_sum_exp, ctx.scale
        )
        returned = domain.to_tokens(*(grad.permute(2, 0, 1, 3) for grad in grad_parts))
        return *(grad.contiguous() for grad in returned), None, None


def _attend(
    domain: DomainAttention, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, h, G, D] in the query's type and log-sum-exp [B, h, G]; key and value [B, k, G, D]."""
    schedule = domain.schedule
    if not query.numel():  # no heads or no tokens: nobody sends to this rank or asks it for anything
        return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    exchange = KeyExchange(_side_by_side(key, value), schedule, domain.domain_group, domain.window)
    kernel = domain.kernel(query)
    own = BlockAttention(kernel, schedule.spans, scale)
    output, log_sum_exp = own.forward(query, key, value, schedule.causal)
    if not schedule.steps:
        return output, log_sum_exp
    merger = Merger(output, log_sum_exp)
    for step, part, received in exchange:
        if received is None:
            continue
        blocks = BlockAttention(kernel, part.spans, scale)
        for block in step.blocks:
            far_key, far_value = _apart(received, block.keys, key.shape[3])
            rows = query[:, slice(*part.heads), slice(*block.queries)]
            merger.add(part.heads, block.queries, *blocks.forward(rows, far_key, far_value, causal=False))
    return merger.output.to(query.dtype), merger.log_sum_exp


def _attend_backward(
    domain: DomainAttention,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query [B, h, G, D], key and value [B, k, G, D], in their types."""
    schedule = domain.schedule
    if not query.numel():
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    kernel = domain.kernel(query)
    own = grad_output, query, key, value, output, log_sum_exp
    if not schedule.steps:
        return BlockAttention(kernel, schedule.spans, scale).backward(*own, schedule.causal)
    first, last = (BlockAttention(kernel, spans, scale) for spans in schedule.spans_in_two)
    own_keys, head_dim = _side_by_side(key, value), key.shape[3]
    exchange = KeyExchange(own_keys, schedule, domain.domain_group, domain.window)
    # Parts are added up in fp32 (fp64 for fp64), so that the number of groups costs no precision.
    wide = log_sum_exp.dtype
    grad_query = torch.zeros_like(query, dtype=wide)
    grad_keys = torch.zeros_like(own_keys, dtype=wide)
    own_sums = grad_query, *_apart(grad_keys, grad_keys.shape[2], head_dim)
    returns = GradientReturn(grad_keys, schedule, domain.domain_group, domain.window)
    # Every step hides the transfers of its neighbours. Before the first there is only the own block to hide
    # its keys and values behind, and after the last only the own block to hide its gradients.
    first.add_backward(own_sums, *own, schedule.causal)
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
    last.add_backward(own_sums, *own, schedule.causal)
    returns.finish()
    return grad_query.to(query.dtype), *_apart(grad_keys.to(query.dtype), grad_keys.shape[2], head_dim)


def _side_by_side(key: Tensor, value: Tensor) -> Tensor:
    """[B, k, G, D] twice as one contiguous [k, B, G, 2 D]: heads first, the layout that travels."""
    return torch.cat((key, value), dim=3).transpose(0, 1).contiguous()


def _apart(keys: Tensor, tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of the first tokens' keys and values, [B, k, S, D] each."""
    prefix = keys[:, :, :tokens].transpose(0, 1)
    return prefix[..., :head_dim], prefix[..., head_dim:]
