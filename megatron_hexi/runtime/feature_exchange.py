"""Send features of images from the ranks that encode them to those that hold their rows.

In the backward pass the gradients of a rank's rows return to the rank that encoded them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hexi.runtime.wire import all_to_all


@dataclass(frozen=True)
class FeatureExchange:
    """The features that a rank of a domain sends and receives.

    Args:
        sent: numbers of the rank's own features, in the order in which they are sent.
        sends: number of features sent to each rank of the group.
        received: for each feature received, its number among those that the rank holds.
        receives: number of features received from each rank of the group.
    """

    sent: Tensor
    sends: list[int]
    received: Tensor
    receives: list[int]
    group: dist.ProcessGroup

    @classmethod
    def of(
        cls, encoders: Tensor, holders: Tensor, group: dist.ProcessGroup, device: torch.device
    ) -> FeatureExchange:
        """Return a rank's exchange; a rank's own features, and those it holds, are in ascending order.

        Args:
            encoders: rank that encodes each feature, [N], on the CPU.
            holders: rank that holds each feature's row, [N], on the CPU.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        to, come = holders[encoders == rank], encoders[holders == rank]
        return cls(
            to.argsort(stable=True).to(device),
            to.bincount(minlength=size).tolist(),
            come.argsort(stable=True).to(device),
            come.bincount(minlength=size).tolist(),
            group,
        )

    def __call__(self, features: Tensor) -> Tensor:
        """Return the features of the rows that the rank holds, [M, H].

        Args:
            features: features of the images that the rank encodes, [N, H].
        """
        held: Tensor = _ToHolders.apply(features, self)
        return held

    def send(self, features: Tensor) -> Tensor:
        """Return features at their holders."""
        arrived = features.new_empty(sum(self.receives), features.shape[1])
        self._pass(arrived, features.index_select(0, self.sent), self.receives, self.sends)
        return torch.empty_like(arrived).index_copy_(0, self.received, arrived)

    def send_back(self, grads: Tensor) -> Tensor:
        """Return gradients at the ranks that encoded their features."""
        arrived = grads.new_empty(sum(self.sends), grads.shape[1])
        self._pass(arrived, grads.index_select(0, self.received), self.sends, self.receives)
        return torch.empty_like(arrived).index_copy_(0, self.sent, arrived)

    def _pass(self, arrived: Tensor, leaving: Tensor, come: list[int], go: list[int]) -> None:
        width = arrived.shape[1]
        sizes = [count * width for count in come], [count * width for count in go]
        all_to_all(arrived.view(-1), leaving.view(-1), *sizes, self.group).wait()


class _ToHolders(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, exchange: FeatureExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.send(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: FeatureExchange = ctx.exchange
        return exchange.send_back(grads[0]), None
