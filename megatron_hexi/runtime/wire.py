"""Send tensors between ranks on NCCL and gloo, by all-to-all or by batches of point-to-point messages.

NCCL has three requirements: all ranks of a group take part in the group's first call (`connect`); calls on
all groups can be carried out in the order in which each rank posts them; two ranks post the messages between
them in the same order.

Gloo sends from host memory only: tensors on a GPU, as in a test of several ranks on one GPU, are copied
through host memory.
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
    """A point-to-point message: a contiguous tensor, and the rank to which or from which it is sent."""

    peer: int
    tensor: Tensor


@dataclass
class Transfers:
    """Messages in flight, whose tensors must not be used before `wait` returns."""

    _works: list[dist.Work] = field(default_factory=list)
    _staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _alive: list[Tensor] = field(default_factory=list)
    kind: Wait = "attention"

    def is_done(self) -> bool:
        """Whether all messages are sent or received."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait until all messages are sent or received; on CUDA, let the current stream wait for them."""
        with waiting(self.kind):
            for work in self._works:
                work.wait()
            for tensor, host in self._staged:
                tensor.copy_(host)
        self._works.clear()
        self._staged.clear()
        self._alive.clear()


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Create the communicator of a process group; all its ranks must call this before they send messages.

    NCCL creates the communicator in the first call on a group, in which each rank waits for all others.
    Point-to-point messages cannot be this call, because a rank without messages would be missing
    (`torch.distributed.batch_isend_irecv`). Gloo creates the communicator with the group.
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
    """Start an all-to-all of flat tensors.

    Args:
        received_sizes: number of elements to receive from each rank; may be 0.
        sent_sizes: number of elements to send to each rank; may be 0.
    """
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
    """Start a batch of point-to-point messages, and return without waiting.

    The group must be connected. NCCL matches messages between two ranks by their order, gloo by tag; so every
    rank must post its batches in the order of their tags. Receives are posted first, since gloo would
    serialise both directions otherwise.
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
