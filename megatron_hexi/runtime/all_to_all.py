"""The all-to-all of a group, from the tokens' layout to the heads' layout of an attention layer and back.

In the tokens' layout, outside attention, a rank holds all heads of its shard's tokens. In the heads' layout,
inside attention, it holds its own heads of all the group's tokens. Member i sends tokens_i x heads_j to
member j: both sizes differ between members. Several tensors (query, key and value) are columns of one
message, so one collective moves them all. Sums that return to the tokens' layout are written directly into
the message.

Megatron computes query, key and value as one tensor. The value stays a view of it, and saving the view for
the backward pass would save the whole tensor: `compact` copies such small views.

Shape letters: T tokens of the shard, L its rows with padding, G tokens of the group, B batch, H all heads, h
own heads, D head size.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from operator import methodcaller

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.plan.traffic import exchanges_heads
from megatron_hexi.runtime.compiled import BufferPlace, Recorder, Value
from megatron_hexi.runtime.fused.plain import Slot
from megatron_hexi.runtime.kernels.base import aligned
from megatron_hexi.runtime.sums import RowSum
from megatron_hexi.runtime.wire import all_to_all

#: Largest unused fraction of a tensor's memory for which no copy is made, so that a padding row causes none.
_USELESS = 0.25


def compact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, which do not overlap; copy those of whose memory they together use too little."""
    used: Counter[int] = Counter()
    for tensor in tensors:
        used[_memory(tensor)] += tensor.nbytes
    return [
        tensor.clone()
        if used[_memory(tensor)] < (1 - _USELESS) * tensor.untyped_storage().nbytes()
        else tensor
        for tensor in tensors
    ]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


#: Range of heads of one tensor that each member of the group holds.
HeadTable = Sequence[Range]


class Arriving:
    """An all-to-all in flight from the tokens' layout [T, B, H, D] to the heads' layout [B, h, G, D].

    Args:
        parts: tensors to send, [T, B, H, D]; H and D may differ between tensors.
        tables: for each tensor, the heads that are sent to each member.
    """

    def __init__(
        self,
        recorder: Recorder,
        parts: Sequence[Value],
        tables: Sequence[HeadTable],
        schedule: Schedule,
        group: dist.ProcessGroup,
    ) -> None:
        self._recorder = recorder
        self._alone: list[Value] | None = None
        if not exchanges_heads(schedule):
            shapes = [(batch, heads, tokens, size) for tokens, batch, heads, size in (p.shape for p in parts)]
            self._alone = recorder.make_each(_heads_first, shapes, *parts)
            return
        batch, sizes = parts[0].shape[1], [part.shape[3] for part in parts]
        slots, sent_sizes = _slots(tables, sizes, schedule.tokens * batch)
        width, self._places = _columns(tables, sizes, schedule, batch)
        sent = recorder.empty(sum(sent_sizes))
        pack = recorder.fused.make_pack(slots, [part.shape[2] for part in parts], recorder.device)
        recorder.do(pack, sent, *parts)
        self._received = recorder.empty(schedule.group_tokens * batch * width)
        received_sizes = [tokens * batch * width for tokens in schedule.shards]
        self._transfers = _start(recorder, self._received, sent, received_sizes, sent_sizes, group)

    def wait(self) -> list[Value]:
        """Wait for the all-to-all; return each tensor as [B, h, G, D], tokens ascending, for kernels."""
        if self._alone is not None:
            return self._alone
        self._recorder.do(methodcaller("wait"), self._transfers)
        return self._recorder.views(self._received, self._places, are_read=True)


class Leaving:
    """An all-to-all in flight from the heads' layout back to the tokens' layout.

    The sums are written directly into the message, which is then sent.

    Args:
        sums: sums to send, [B, h, G, D] each.

    Attributes:
        written: each sum as written into the message, with its log-sum-exp.
    """

    def __init__(
        self,
        recorder: Recorder,
        sums: Sequence[RowSum],
        tables: Sequence[HeadTable],
        schedule: Schedule,
        group: dist.ProcessGroup,
    ) -> None:
        self.tables, self.schedule = tables, schedule
        self.batch, self.sizes = sums[0].shape[0], [row_sum.shape[3] for row_sum in sums]
        if not exchanges_heads(schedule):
            self.written = [row_sum.result() for row_sum in sums]
            return
        self.slots, sizes = _slots(tables, self.sizes, schedule.tokens * self.batch)
        width, places = _columns(tables, self.sizes, schedule, self.batch)
        sent = recorder.empty(schedule.group_tokens * self.batch * width)
        targets = recorder.views(sent, places)
        self.written = [
            (target, row_sum.write(target)) for target, row_sum in zip(targets, sums, strict=True)
        ]
        self.received = recorder.empty(sum(sizes))
        sent_sizes = [tokens * self.batch * width for tokens in schedule.shards]
        self.transfers = _start(recorder, self.received, sent, sizes, sent_sizes, group)


def arrive(
    recorder: Recorder, halves: Sequence[Leaving], half: int, padding: int, parts: Sequence[Value] = ()
) -> Sequence[Value]:
    """Wait for one half of the heads that `Leaving` sent, and write it to tensors in the tokens' layout.

    A head that several members hold (a shared KV head) arrives from each of them and is summed in fp32 (fp64
    for fp64).

    Args:
        halves: the all-to-alls of all halves of the heads; the last may carry further tensors.
        padding: number of rows of zeros after the tokens.

    Returns:
        The tensors, [L, B, H, D], which are complete when all halves have arrived.
    """
    leaving, schedule = halves[half], halves[half].schedule
    rows = schedule.tokens + padding
    if not exchanges_heads(schedule):
        run = partial(_tokens_first, padding)
        shapes = [(rows, *value.shape[:2], value.shape[3]) for value, _ in leaving.written]
        return [
            recorder.make(run, shape, value)
            for shape, (value, _) in zip(shapes, leaving.written, strict=True)
        ]
    if not parts:
        parts = [recorder.empty(rows, leaving.batch, *sizes) for sizes in _home_sizes(halves)]
        for part in parts if padding else ():
            recorder.do(torch.Tensor.zero_, part.cut((schedule.tokens, rows)))
    here = [part.cut((0, schedule.tokens)) for part in parts[: len(leaving.sizes)]]
    unpack = recorder.fused.make_unpack(leaving.slots, [part.shape[2] for part in here], recorder.device)
    recorder.do(methodcaller("wait"), leaving.transfers)
    recorder.do(unpack, leaving.received, *here)
    return parts


def _home_sizes(halves: Sequence[Leaving]) -> Iterator[tuple[int, int]]:
    """Yield the number of heads and the head size of each tensor in the tokens' layout."""
    for number, size in enumerate(halves[-1].sizes):
        tables = [half.tables[number] for half in halves if number < len(half.tables)]
        yield max(stop for table in tables for _, stop in table), size


def _start(
    recorder: Recorder,
    received: Value,
    sent: Value,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Value:
    """Record the start of an all-to-all; return the value that holds its `Transfers`."""
    run = partial(all_to_all, received_sizes=received_sizes, sent_sizes=sent_sizes, group=group)
    return recorder.make(run, (), received, sent)


def _heads_first(*parts: Tensor) -> list[Tensor]:
    """Transpose [T, B, H, D] to [B, H, T, D], which kernels read, on the only rank of a group."""
    return [aligned(part.permute(1, 2, 0, 3)) for part in compact(parts)]


def _tokens_first(padding: int, part: Tensor) -> Tensor:
    """Transpose [B, H, T, D] to [L, B, H, D], the layer's output, on the only rank of a group."""
    part = part.permute(2, 0, 1, 3)
    return torch.constant_pad_nd(part, (*[0] * 7, padding)) if padding else part.contiguous()


def _columns(
    tables: Sequence[HeadTable], sizes: Sequence[int], schedule: Schedule, batch: int
) -> tuple[int, list[BufferPlace]]:
    """Return the width of a message [G, B, width] of a rank's heads, and the place of each tensor in it."""
    heads = [_size(table[schedule.position]) for table in tables]
    ends = [0, *itertools.accumulate(count * size for count, size in zip(heads, sizes, strict=True))]
    width, tokens = ends[-1], schedule.group_tokens
    return width, [
        BufferPlace((batch, count, tokens, size), (width, size, batch * width, 1), offset)
        for count, size, offset in zip(heads, sizes, ends[:-1], strict=True)
    ]


def _slots(tables: Sequence[HeadTable], sizes: Sequence[int], rows: int) -> tuple[list[Slot], list[int]]:
    """Return the slots of heads in a message to or from all members, and each member's number of elements."""
    slots: list[Slot] = []
    elements: list[int] = []
    for member in range(len(tables[0])):
        width = sum(_size(table[member]) * size for table, size in zip(tables, sizes, strict=True))
        offset = sum(elements)
        elements.append(rows * width)
        for part, (table, size) in enumerate(zip(tables, sizes, strict=True)):
            slots.append(Slot(part, table[member], size, offset, width))
            offset += _size(table[member]) * size
    return slots, elements


def _size(heads: Range) -> int:
    return heads[1] - heads[0]
