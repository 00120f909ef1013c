"""Attention over a domain whose ranks hold different numbers of tokens and heads; exact as on one device.

A token passes through one layer as follows:

    own tokens, all heads  --all-to-all-->  own heads, the group's tokens
        blocks of the own group, while keys and values of the next group arrive
        one block after another against the other groups' keys, merged in fp32
    own heads, the group's tokens  --all-to-all-->  own tokens, all heads

The backward pass is the reverse: an all-to-all of the output's gradient; the exchange of keys and values
again, since they are not kept; the return of their gradients to the owners; an all-to-all of the gradients of
query, key and value back to the tokens' layout. Both passes are compiled (`passes`) once for each mask and
kind of tensors.

Shape letters: T tokens of the shard, L rows of the shard with padding, B batch, H query heads, K KV heads, D
size of a head, Dv size of a head's value.

If latent columns are exchanged (`Workload.latent_exchange`), the argument `key` holds the latent columns, the
argument `value` the rotary columns, and each rank computes its heads' keys and values from them (`latent`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.errors import HexiError
from megatron_hexi.plan.blocks import Mask
from megatron_hexi.plan.schedule import Schedules
from megatron_hexi.plan.workload import Workload
from megatron_hexi.runtime.agreement import agree_on_shapes
from megatron_hexi.runtime.kernels import KernelDispatch, select_kernel
from megatron_hexi.runtime.passes import AttentionLayer, Inputs
from megatron_hexi.runtime.wire import connect

#: Number of cached layers: enough for the micro-batches in flight in a pipeline, with a few windows each.
_KEPT = 32


@dataclass
class DomainAttention:
    """Core attention of one rank under a plan, as a differentiable function.

    After a swap of plans another object with its own compiled passes is used; passes in flight finish with
    the old object.

    Args:
        a2a_group: process group of the rank's A2A group, in rank order.
        window: number of exchange steps in flight ahead of the step in use.
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
    #: Cached layers by mask, kind of tensors and scale, in the order of their last use. Copies of this object
    #: do not share the cache (`init=False`).
    _layers: dict[tuple[Mask | None, Inputs, float | None], AttentionLayer] = field(
        default_factory=dict, init=False, repr=False
    )

    def connect(self, device: torch.device) -> None:
        """Create the communicators of `domain_group` and `a2a_group`, while no communication is in flight.

        All ranks of the domain must call this method before any of them computes attention.
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
        """Return the attention output of the rank's tokens, [L, B, H, Dv]; call `connect` before.

        Args:
            query: query [L, B, H, D].
            key: key [L, B, K, D]; with `matrix`, latent columns [L, B, 1, C].
            value: value [L, B, K, Dv]; with `matrix`, rotary columns [L, B, 1, R].
            scale: softmax scale; ``None``: 1 / sqrt(D). Required with `matrix`.
            mask: attention mask, the same on all ranks; ``None``: the plan's mask. If it has documents, the
                rank's shard is the segments `self.schedules(mask).segments`.
            sinks: logit of each head's sink [H], the same on all ranks; ``None``: no sinks.
            padding: number of padding rows at the end, L - T; they are not read, and are 0 in the output and
                in gradients.
            matrix: with exchanged latent columns, the up-projection [H (N + Dv), C] of these to each head's
                value and to its key without the rotary columns, N = D - R. Its gradient on this rank is a
                part, which is to be summed over the ranks of the domain.

        Raises:
            PlanError: the tensors do not fit the plan, or differ between ranks, in which case every rank
                raises.
            PlatformError: no kernel can compute attention of such tensors.
        """
        kind = mask, Inputs.from_tensors(query, key, value, sinks, padding, matrix), scale
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
        """Return an `AttentionLayer` for the arguments of `__call__`, to be compiled on first use."""
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
        """Return the kernels for tensors with heads of a size; cached, since the choice imports packages."""
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
