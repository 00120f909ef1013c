"""The all-to-all between the two layouts of an attention layer: own tokens, or own heads.

Outside attention a rank holds all heads of its own tokens; inside, its own heads of all the group's
tokens. The send from member i to member j is tokens_i x heads_j: both axes are ragged. Several tensors
(query, key and value) travel as columns of one message, so one collective moves them all. Sums that leave
the heads' layout are written straight into the message.

Shape letters: T tokens of the shard, L its rows with padding, G tokens of the group, B batch, H all heads, h
own heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from operator import methodcaller

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.plan.traffic import exchanges_heads
from megatron_hexi.runtime.compact import compact
from megatron_hexi.runtime.compiled import BufferPlace, Recorder, Value
from megatron_hexi.runtime.fused.slots import Slot
from megatron_hexi.runtime.kernels.dispatch import aligned
from megatron_hexi.runtime.sums import RowSum
from megatron_hexi.runtime.wire import all_to_all

#: The heads of each member of the group, for one tensor.
HeadTable = Sequence[Range]


class Arriving:
    """Tensors on their way to the heads' layout: from all heads of own tokens to own heads of all tokens.

    Args:
        recorder: compiles the pass.
        parts: tensors [T, B, H, D]; H and D may differ between tensors.
        tables: the heads that travel to each member, for each part.
        schedule: the rank's split tables.
        group: the ranks of the A2A group.
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
        pack = recorder.fused.pack(slots, [part.shape[2] for part in parts], recorder.device)
        recorder.do(pack, sent, *parts)
        self._received = recorder.empty(schedule.group_tokens * batch * width)
        received_sizes = [tokens * batch * width for tokens in schedule.shards]
        self._transfers = _start(recorder, self._received, sent, received_sizes, sent_sizes, group)

    def wait(self) -> list[Value]:
        """Return the arrived part of each tensor, [B, h, G, D], tokens ascending; kernels can read it."""
        if self._alone is not None:
            return self._alone
        self._recorder.do(methodcaller("wait"), self._transfers)
        return self._recorder.views(self._received, self._places, are_read=True)


class Leaving:
    """Sums on their way back to the tokens' layout: written straight into the message, and sent.

    Args:
        recorder: compiles the pass.
        sums: sums of [B, h, G, D] each.
        tables: the heads that travel from each member, for each sum.
        schedule: the rank's split tables.
        group: the ranks of the A2A group.

    Attributes:
        written: each sum with its log-sum-exp.
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
    """Wait for a half of the heads that `Leaving` sent, and return it in the tokens' layout.

    A head that several members hold (a shared KV head) arrives from each of them and is summed in fp32 (fp64
    for fp64).

    Args:
        recorder: compiles the pass.
        halves: all halves; the last may have further tensors.
        half: number of the half that arrives.
        padding: rows of zeros behind the tokens.
        parts: the result for the half before.

    Returns:
        Each tensor, [L, B, H, D]; complete when all halves have arrived.
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
    unpack = recorder.fused.unpack(leaving.slots, [part.shape[2] for part in here], recorder.device)
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
    """Start an all-to-all; returns the transfers to wait for."""
    run = partial(all_to_all, received_sizes=received_sizes, sent_sizes=sent_sizes, group=group)
    return recorder.make(run, (), received, sent)


def _heads_first(*parts: Tensor) -> list[Tensor]:
    """Return [T, B, H, D] of a rank that is alone in its group as [B, H, T, D], which kernels read."""
    return [aligned(part.permute(1, 2, 0, 3)) for part in compact(parts)]


def _tokens_first(padding: int, part: Tensor) -> Tensor:
    """Return [B, H, T, D] of a rank that is alone in its group as [L, B, H, D], the layer's output."""
    part = part.permute(2, 0, 1, 3)
    return torch.constant_pad_nd(part, (*[0] * 7, padding)) if padding else part.contiguous()


def _columns(
    tables: Sequence[HeadTable], sizes: Sequence[int], schedule: Schedule, batch: int
) -> tuple[int, list[BufferPlace]]:
    """Return the width of a message of own heads, [G, B, width], and the place of each [B, h, G, D] in it."""
    heads = [_size(table[schedule.position]) for table in tables]
    ends = [0, *itertools.accumulate(count * size for count, size in zip(heads, sizes, strict=True))]
    width, tokens = ends[-1], schedule.group_tokens
    return width, [
        BufferPlace((batch, count, tokens, size), (width, size, batch * width, 1), offset)
        for count, size, offset in zip(heads, sizes, ends[:-1], strict=True)
    ]


def _slots(tables: Sequence[HeadTable], sizes: Sequence[int], rows: int) -> tuple[list[Slot], list[int]]:
    """Return the slots of own tokens' heads in a message to or from all members, and elements for each."""
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
