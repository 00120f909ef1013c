"""Send and receive rows asynchronously over the border between two stages, by the tables of `mesh.border`.

A channel is one rank's end of one direction of a border. Sends stay in flight while the rank goes on
computing. Receives are posted one micro-batch ahead. So a rank has messages of both directions in flight at
once, and their order alone would let neither direction end: each direction has its own process group, and the
device must let messages of both groups make progress at the same time. NCCL has a stream for each group; not
tested on GPUs.

Rows of micro-batches that wait between two ministages are stored on the device or in host memory.

A message with consecutive rows of all samples of a rank is sent and received in place; other messages are
packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.mesh import HeldRows, RowBlock, RowMessage
from megatron_hexi.runtime.host_memory import Arrival, HostMemory
from megatron_hexi.runtime.wire import Message, Transfers, post

#: Tag of all messages: gloo matches messages by tag, and one tag suffices since each channel has its own
#: group.
_TAG = 7


class RowChannel:
    """One rank's end of one direction of a border.

    Args:
        group: process group of the ranks of both stages, used for this direction only.
    """

    def __init__(
        self, messages: Sequence[RowMessage], held: HeldRows, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group = group
        self._device = device
        self._table: Sequence[RowMessage] | None = None
        self.set_table(messages, held)
        #: Sends in flight, each with the number of its micro-batch among all that were sent.
        self._leaving: deque[tuple[int, Transfers]] = deque()
        #: Number of micro-batches sent so far.
        self.sent = 0
        self._arriving: tuple[Tensor, list[Tensor | None], Transfers] | None = None
        #: Number of bytes sent so far, to be compared with the table.
        self.sent_bytes = 0

    def set_table(self, messages: Sequence[RowMessage], held: HeldRows) -> None:
        """Use another table from the next micro-batch on; each micro-batch of documents has its own table."""
        if messages is self._table:
            return
        self._table, self._held = messages, held
        self._sends = [message for message in messages if message.source == held.rank]
        self._receives = [message for message in messages if message.target == held.rank]
        self._index = {
            block: self._rows(block)
            for message in (*self._sends, *self._receives)
            for block in message.blocks
        }
        self._runs = {message: self._run(message) for message in (*self._sends, *self._receives)}

    def send(self, rows: Tensor) -> None:
        """Start sending a micro-batch, and return at once.

        Args:
            rows: rows of this rank with padding, [L, b, hidden]. The caller may drop the tensor at once, but
                must not write to it.
        """
        rows = rows.detach()
        messages = [
            Message(self._peer(message.target), self._outgoing(rows, message)) for message in self._sends
        ]
        self.sent_bytes += sum(message.tensor.nbytes for message in messages)
        while self._leaving and self._leaving[0][1].is_done():
            self._leaving.popleft()[1].wait()
        self._leaving.append((self.sent, post((), messages, self._group, _TAG, "pipeline")))
        self.sent += 1

    def expect(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Post the receives of the next micro-batch, unless they are posted already."""
        if self._arriving is not None:
            return
        # Padding rows come from nowhere: they are zero, and so are their gradients.
        whole = torch.zeros(shape, dtype=dtype, device=self._device)
        packed: list[Tensor | None] = []
        messages = []
        for message in self._receives:
            run = self._runs[message]
            part = whole.new_empty(message.num_rows * shape[2]) if run is None else None
            packed.append(part)
            target = whole[run].flatten() if part is None else part
            messages.append(Message(self._peer(message.source), target))
        self._arriving = whole, packed, post(messages, (), self._group, _TAG, "pipeline")

    def receive(self) -> Tensor:
        """Wait for the expected micro-batch, and return its rows [L, b, hidden]."""
        assert self._arriving is not None, "expect() comes first"
        whole, packed, transfers = self._arriving
        self._arriving = None
        transfers.wait()
        for message, part in zip(self._receives, packed, strict=True):
            if part is None:
                continue
            offset = 0
            for block in message.blocks:
                size = block.num_rows * whole.shape[2]
                self._fill(whole, block, part[offset : offset + size])
                offset += size
        return whole

    def finish(self, number: int | None = None) -> None:
        """Wait until the sends up to the micro-batch with a number are complete; ``None``: all sends."""
        while self._leaving and (number is None or self._leaving[0][0] <= number):
            self._leaving.popleft()[1].wait()

    def _outgoing(self, rows: Tensor, message: RowMessage) -> Tensor:
        """Return the rows of a message as a flat tensor: a view if possible, otherwise a packed copy."""
        run = self._runs[message]
        if run is not None and rows.is_contiguous():
            return rows[run].flatten()
        return torch.cat([self._cut(rows, block).flatten() for block in message.blocks])

    def _run(self, message: RowMessage) -> slice | None:
        """Return a message's rows as one slice of this rank's; ``None`` if not contiguous, so to be packed.

        A slice needs consecutive rows of all samples of this rank.
        """
        ranges = [part for block in message.blocks for part in self._held.local(block.positions)]
        if any(block.samples != self._held.samples for block in message.blocks):
            return None
        if any(before[1] != behind[0] for before, behind in pairwise(ranges)):
            return None
        return slice(ranges[0][0], ranges[-1][1])

    def _cut(self, rows: Tensor, block: RowBlock) -> Tensor:
        index, samples = self._index[block]
        cut = rows[:, samples]
        return cut[index] if isinstance(index, slice) else cut.index_select(0, index)

    def _fill(self, rows: Tensor, block: RowBlock, part: Tensor) -> None:
        index, samples = self._index[block]
        rows[:, samples][index] = part.view(-1, samples.stop - samples.start, rows.shape[2])

    def _rows(self, block: RowBlock) -> tuple[slice | Tensor, slice]:
        """Return the indices of a block's rows and samples in this rank's tensor."""
        first = self._held.samples[0]
        samples = slice(block.samples[0] - first, block.samples[1] - first)
        ranges = self._held.local(block.positions)
        if len(ranges) == 1:
            return slice(*ranges[0]), samples
        index = torch.cat([torch.arange(start, stop) for start, stop in ranges])
        return index.to(self._device), samples

    def _peer(self, rank: int) -> int:
        return dist.get_group_rank(self._group, rank)


#: Key of stored rows: number of the ministage and number of the micro-batch.
Where = tuple[int, int]


class RowStore(Protocol):
    """A store of rows by ministage and micro-batch."""

    def put(self, where: Where, rows: Tensor) -> None:
        """Store rows; the caller may free them, and must not write to them."""

    def get(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows, which stay in the store.

        Args:
            following: key of the rows that are needed next; ``None``: none are.
        """

    def pop(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows and remove them from the store; arguments are those of `get`."""


class DeviceRows:
    """A store of rows on the device."""

    def __init__(self) -> None:
        self._kept: dict[Where, Tensor] = {}

    def put(self, where: Where, rows: Tensor) -> None:
        """Store rows under a key. See `RowStore.put`."""
        self._kept[where] = rows.detach()

    def get(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows, which stay in the store. See `RowStore.get`."""
        return self._kept[where]

    def pop(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows and remove them from the store. See `RowStore.pop`."""
        return self._kept.pop(where)


class HostRows:
    """A store of rows in host memory; only rows in use and rows needed next are on the device."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._memory: dict[Where, Tensor] = {}
        #: Buffers that became too small: CUDA knows their memory, so they are not given back.
        self._outgrown: list[Tensor] = []
        self._shapes: dict[Where, torch.Size] = {}
        self._coming: dict[Where, tuple[Tensor, Arrival]] = {}

    def put(self, where: Where, rows: Tensor) -> None:
        """Store rows under a key. See `RowStore.put`."""
        rows, size = rows.detach(), rows.numel()
        kept = self._memory.get(where)
        if kept is None or kept.numel() < size or kept.dtype != rows.dtype:
            # Documents may bring a rank other rows each time: buffers grow a few times at most.
            larger = size if kept is None else max(size, 2 * kept.numel())
            self._outgrown += [] if kept is None else [kept]
            kept = self._memory[where] = self._host.empty((larger,), rows.dtype)
        self._shapes[where] = rows.shape
        self._host.copy_out(kept[:size].view(rows.shape), rows)
        self._device = rows.device

    def get(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows, which stay in the store. See `RowStore.get`."""
        rows, arrival = self._coming.pop(where) if where in self._coming else self._bring(where)
        if following is not None:
            self._coming[following] = self._bring(following)
        arrival.wait()
        return rows

    def pop(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows and remove them from the store. See `RowStore.pop`."""
        return self.get(where, following)

    def _bring(self, where: Where) -> tuple[Tensor, Arrival]:
        kept, shape = self._memory[where], self._shapes[where]
        rows = kept.new_empty(shape, device=self._device)
        return rows, self._host.copy_back(rows, kept[: shape.numel()].view(shape))
