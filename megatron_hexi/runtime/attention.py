"""Attention over a domain: uneven in tokens, heads and groups, exact as on one device.

The way of a token through one layer:

    own tokens, all heads  --all-to-all-->  own heads, the group's tokens
        blocks of the own group, while keys and values of the next group arrive
        one block after another against the other groups' keys, merged in fp32
    own heads, the group's tokens  --all-to-all-->  own tokens, all heads

The backward pass takes the same way back: the output's gradient in, keys and values exchanged again (they
are not kept), their gradients sent to the owners, all three gradients back to the tokens' layout. Both passes
are compiled (`passes`), once for each mask and kind of tensors.

Shape letters: T tokens of the shard, L its rows with padding, B batch, H query heads, K KV heads, D head size
(Dv that of values).

Where latent columns travel (`Workload.latent_exchange`), the key is the columns without positions, the value
those with rotary positions, and each rank makes its heads' keys and values of them (`latent`).
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
from megatron_hexi.runtime.kernels import KernelDispatch, select_kernel
from megatron_hexi.runtime.passes import AttentionLayer, Inputs
from megatron_hexi.runtime.wire import connect

#: Number of cached layers: a pipeline's micro-batches under way, with a few windows each.
_KEPT = 32


@dataclass
class DomainAttention:
    """Attention of one rank under a plan.

    A swapped plan is another object with its own compiled passes; passes under way finish with the old one.

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
    _kernels: dict[tuple[torch.device, torch.dtype, int], KernelDispatch] = field(
        default_factory=dict, repr=False
    )
    #: By mask, kind of tensors and scale, in the order of their last use. Copies do not share them
    #: (`init=False`).
    _layers: dict[tuple[Mask | None, Inputs, float | None], AttentionLayer] = field(
        default_factory=dict, init=False, repr=False
    )

    def connect(self, device: torch.device) -> None:
        """Create the communicators of both groups, while nothing else is under way.

        All ranks of the domain must call it, before any of them computes attention.

        Args:
            device: device of the tensors that attention will be given.
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
        padding: int = 0,
        matrix: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of the rank's own tokens; `connect` comes first.

        Args:
            query: [L, B, H, D].
            key: [L, B, K, D].
            value: [L, B, K, Dv]; Dv is the plan's size of values.
            scale: softmax scale; 1 / sqrt(D) if not given.
            mask: keys that a query sees, the same on all ranks; ``None``: as the plan says. With documents a
                shard has other positions: `schedules(mask).segments`.
            sinks: logit of each head's sink [H], the same on all ranks; ``None`` for none.
            padding: number of last rows that are no tokens, L - T; they are not read, and are 0 in the output
                and in gradients.
            matrix: [H (N + V), C], the columns of each head's key without positions, N = D - R, and of its
                value, V = Dv, where latent columns travel: `key` is [L, B, 1, C], `value` [L, B, 1, R]. The
                scale is then given. Its gradient is this rank's part of a sum over all ranks of the domain.

        Returns:
            [L, B, H, Dv].

        Raises:
            PlanError: the tensors are not those of the plan, or another rank's differ; on every rank.
            PlatformError: no kernel takes such tensors.
        """
        kind = mask, Inputs.of(query, key, value, sinks, padding, matrix), scale
        layer = self._layers.pop(kind, None) or self._new_layer(query, key, value, scale, mask, kind[1])
        self._layers[kind] = layer
        if len(self._layers) > _KEPT:
            del self._layers[next(iter(self._layers))]
        output: Tensor = _DomainAttentionFunction.apply(query, key, value, sinks, matrix, layer)
        return output

    def _new_layer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        mask: Mask | None,
        inputs: Inputs,
    ) -> AttentionLayer:
        """Return a layer for the arguments of `__call__`; its passes are compiled on first use."""
        schedule = self.schedules(mask)
        tensors = [tensor[: len(tensor) - inputs.padding] for tensor in (query, key, value)]
        agree_on_shapes(self.workload, schedule, tensors, self.domain_group, self._agreed)
        return AttentionLayer(
            schedule=schedule,
            kernel=self.kernel(query.device, query.dtype, inputs.widest),
            scale=1.0 / math.sqrt(query.shape[3]) if scale is None else scale,
            domain_group=self.domain_group,
            a2a_group=self.a2a_group,
            window=self.window,
            inputs=inputs,
        )

    def kernel(self, device: torch.device, dtype: torch.dtype, size: int) -> KernelDispatch:
        """Return the kernel for heads of a size; chosen once, since it looks for packages."""
        kind = (device, dtype, size)
        if kind not in self._kernels:
            self._kernels[kind] = select_kernel(self.kernel_name, *kind)
        return self._kernels[kind]


class _DomainAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        matrix: Tensor | None,
        layer: AttentionLayer,
    ) -> Tensor:
        ctx.layer = layer
        if not layer.schedule.group_tokens:  # nobody sends to this group or asks it for anything
            ctx.save_for_backward(query, key, value, sinks, matrix)
            return query.new_zeros(layer.inputs.output)
        output, *saved = layer.forward(query, key, value, sinks, matrix)
        ctx.save_for_backward(*saved, sinks, matrix)
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Silently wrong otherwise: to autograd the kernels' gradients are constants.
            raise HexiError(
                "attention under a plan has no second derivative; differentiate without create_graph=True"
            )
        layer: AttentionLayer = ctx.layer
        saved = ctx.saved_tensors
        if not layer.schedule.group_tokens:
            zeros = (None if tensor is None else torch.zeros_like(tensor) for tensor in saved)
            return *zeros, None
        return *layer.backward(*grads, *saved), None
