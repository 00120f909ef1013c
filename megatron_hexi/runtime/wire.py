"""The two ways in which ranks send each other tensors, on NCCL and gloo: all-to-all and point-to-point.

NCCL needs three things: a group's first call is made by all its ranks (`connect`); calls on all groups can be
carried out in the order in which each rank posts them; messages between two ranks are posted in the same
order on both.

Gloo sends from host memory only: tensors on a GPU (in a test of several ranks on one GPU, say) are staged
through the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.runtime.waiting import Wait, waiting


class Message(NamedTuple):
    """A contiguous tensor to send to another rank of the group, or to receive from it."""

    peer: int
    tensor: Tensor


@dataclass
class Transfers:
    """Messages under way. Their tensors must not be touched before `wait`."""

    _works: list[dist.Work] = field(default_factory=list)
    _staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _alive: list[Tensor] = field(default_factory=list)
    kind: Wait = "attention"

    def is_done(self) -> bool:
        """Whether all have left or arrived."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Return when all have arrived (on CUDA: when the current stream will see them)."""
        with waiting(self.kind):
            for work in self._works:
                work.wait()
            for tensor, host in self._staged:
                tensor.copy_(host)
        self._works.clear()
        self._staged.clear()
        self._alive.clear()


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Create the communicator of a group; all its ranks must call it before they send each other anything.

    NCCL creates it in the first call on a group, in which each rank waits for all others. Messages cannot be
    that call: a rank without messages would be missing (`torch.distributed.batch_isend_irecv`). Gloo creates
    it with the group.

    Args:
        group: the ranks.
        device: device of the tensors that they will send.
    """
    if dist.get_world_size(group) > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def all_to_all(
    received: Tensor,
    sent: Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Transfers:
    """Start an all-to-all of flat tensors; the sizes count elements and may differ, zeros are allowed."""
    transfers = Transfers()
    target = received
    if _staged(sent, group):
        target, sent = torch.empty_like(received, device="cpu"), sent.cpu()
        transfers._staged.append((received, target))
    sizes = list(received_sizes), list(sent_sizes)
    work = dist.all_to_all_single(target, sent, *sizes, group=group, async_op=True)
    assert work is not None, "the rank is a member of the group"
    transfers._works.append(work)
    transfers._alive += target, sent
    return transfers


def post(
    receives: Sequence[Message],
    sends: Sequence[Message],
    group: dist.ProcessGroup,
    tag: int,
    kind: Wait = "attention",
) -> Transfers:
    """Start sending and receiving, without waiting.

    The group is connected. NCCL matches messages between two ranks by their order, gloo by tag: so every rank
    posts its batches in the order of their tags. Receives go first: gloo would serialise both directions
    otherwise.
    """
    transfers = Transfers(kind=kind)
    operations: list[dist.P2POp] = []
    for message in receives:
        tensor = message.tensor
        if _staged(tensor, group):
            tensor = torch.empty_like(tensor, device="cpu")
            transfers._staged.append((message.tensor, tensor))
        transfers._alive.append(tensor)
        operations.append(dist.P2POp(dist.irecv, tensor, group=group, group_peer=message.peer, tag=tag))
    for message in sends:
        tensor = message.tensor.cpu() if _staged(message.tensor, group) else message.tensor
        transfers._alive.append(tensor)
        operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=message.peer, tag=tag))
    if operations:
        transfers._works.extend(dist.batch_isend_irecv(operations))
    return transfers


def _staged(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.is_cuda and dist.get_backend(group) == dist.Backend.GLOO
