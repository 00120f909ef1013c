"""Attention over a domain: uneven in tokens, heads and groups, exact as on one device.

The way of a token through one layer:

    own tokens, all heads  --all-to-all-->  own heads, the group's tokens
        blocks of the own group, while keys and values of the next group arrive
        one block after another against the other groups' keys, merged in fp32
    own heads, the group's tokens  --all-to-all-->  own tokens, all heads

The backward walks the same way back: the output's gradient in, keys and values exchanged again (they
are not kept), their gradients sent to the owners, all three gradients back to the tokens' layout. What
happens between the all-to-alls is in `passes`.

Shape letters: T tokens of the shard, B batch, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.errors import HexiError
from megatron_hexi.plan.mask import Mask
from megatron_hexi.plan.model import Workload
from megatron_hexi.plan.schedule import Schedules
from megatron_hexi.runtime.agreement import agree_on_shapes
from megatron_hexi.runtime.all_to_all import arrive, tokens_to_heads
from megatron_hexi.runtime.kernels import Kernel, select_kernel
from megatron_hexi.runtime.passes import Layer, Saved, attend, attend_backward
from megatron_hexi.runtime.ranges import phase
from megatron_hexi.runtime.wire import connect


@dataclass
class DomainAttention:
    """What one rank needs to compute attention under a plan; everything here is derived from it.

    Swapping the plan means replacing this object.

    Args:
        workload: the model and sequence of the plan.
        schedules: this rank's split tables.
        domain_group: the ranks of the domain, in rank order.
        a2a_group: the ranks of its A2A group, in rank order.
        window: exchange steps under way ahead of the one in use.
        kernel_name: a kernel's name, or ``auto``.
    """

    workload: Workload
    schedules: Schedules
    domain_group: dist.ProcessGroup
    a2a_group: dist.ProcessGroup
    window: int = 1
    kernel_name: str = "auto"
    _agreed: set[tuple[int, ...]] = field(default_factory=set, repr=False)
    _kernels: dict[tuple[torch.device, torch.dtype, int], Kernel] = field(default_factory=dict, repr=False)

    def connect(self, device: torch.device) -> None:
        """Make the communicators of both groups, while nothing else is under way.

        All ranks of the domain must come, before any of them computes attention.

        Args:
            device: of the tensors that attention will be given.
        """
        connect(self.domain_group, device)
        connect(self.a2a_group, device)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        mask: Mask | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the rank's own tokens, after `connect`.

        Args:
            query: [T, B, H, D].
            key: [T, B, K, D].
            value: [T, B, K, Dv]; Dv is the plan's size of values.
            scale: softmax scale; 1 / sqrt(D) if not given.
            mask: what a query sees, the same on all ranks; ``None``: as the plan says. With documents a shard
                has other positions: `schedules(mask).segments`.
            sinks: logit of each head's sink [H], the same on all ranks; ``None`` for none.

        Returns:
            [T, B, H, Dv].

        Raises:
            PlanError: the tensors are not those of the plan, or another rank's differ; on every rank.
            PlatformError: no kernel takes such tensors.
        """
        schedule = self.schedules(mask)
        agree_on_shapes(self.workload, schedule, (query, key, value), self.domain_group, self._agreed)
        layer = Layer(
            schedule=schedule,
            kernel=self.kernel(query if query.shape[3] >= value.shape[3] else value),
            scale=1.0 / math.sqrt(query.shape[3]) if scale is None else scale,
            domain_group=self.domain_group,
            a2a_group=self.a2a_group,
            window=self.window,
        )
        output: Tensor = _DomainAttentionFunction.apply(query, key, value, sinks, layer)
        return output

    def kernel(self, tensor: Tensor) -> Kernel:
        """The kernel for tensors of this kind, [..., D]; chosen once, for it looks at what is installed."""
        kind = (tensor.device, tensor.dtype, tensor.shape[-1])
        if kind not in self._kernels:
            self._kernels[kind] = select_kernel(self.kernel_name, *kind)
        return self._kernels[kind]


class _DomainAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layer: Layer
    ) -> Tensor:
        schedule = layer.schedule
        ctx.layer = layer
        own_sinks = None if sinks is None else sinks[slice(*schedule.heads[schedule.position])]
        if not schedule.group_tokens:  # nobody sends to this group or asks it for anything
            ctx.save_for_backward(query, key, value, sinks)
            return query.new_empty(*query.shape[:3], value.shape[3])
        first, *others = schedule.halves
        tables = first, schedule.kv, schedule.kv
        with phase("post all-to-all in"):
            arriving = [tokens_to_heads((query, key, value), tables, schedule, layer.a2a_group)]
            arriving += [tokens_to_heads((query,), (half,), schedule, layer.a2a_group) for half in others]
        saved, leaving = attend(layer, arriving, own_sinks)
        halves = (*saved.queries, *saved.outputs, *saved.log_sum_exps)
        ctx.save_for_backward(saved.key, saved.value, *halves, sinks)
        with phase("wait for all-to-all out"):
            return arrive(leaving)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Silently wrong otherwise: to autograd the kernels' gradients are constants.
            raise HexiError(
                "attention under a plan has no second derivative; differentiate without create_graph=True"
            )
        layer: Layer = ctx.layer
        schedule = layer.schedule
        first, second, *rest, sinks = ctx.saved_tensors
        grad_sinks = None if sinks is None else torch.zeros_like(sinks)
        if not schedule.group_tokens:
            return *map(torch.empty_like, (first, second, *rest)), grad_sinks, None
        own = slice(*schedule.heads[schedule.position])
        with phase("post all-to-all in"):
            arriving = [
                tokens_to_heads(grads, (half,), schedule, layer.a2a_group) for half in schedule.halves
            ]
        count = len(schedule.halves)
        saved = Saved(first, second, rest[:count], rest[count : 2 * count], rest[2 * count :])
        leaving, grad_own = attend_backward(layer, arriving, saved, None if sinks is None else sinks[own])
        if grad_sinks is not None and grad_own is not None:
            grad_sinks[own] = grad_own
        with phase("wait for all-to-all out"):
            return *arrive(leaving), grad_sinks, None
