"""The ragged all-to-all between the two layouts of an attention layer.

Outside attention a rank holds all heads of its own tokens; inside, its own heads of all the group's
tokens. The send from member i to member j is tokens_i x heads_j: both axes are ragged. Several tensors
(query, key and value) travel as columns of one message, so one collective moves them all. Nothing is
waited for here: what travels is wanted later than it leaves. What leaves the heads' layout is written where
it leaves from.

Shape letters: T tokens of the shard, G tokens of the group, B batch, H all heads, h own heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.plan.traffic import exchanges_heads
from megatron_hexi.runtime import fused
from megatron_hexi.runtime.compact import compact
from megatron_hexi.runtime.fused.terms import Slot, Sum
from megatron_hexi.runtime.sums import RowSum
from megatron_hexi.runtime.wire import Transfers, all_to_all

#: For one tensor: the heads of each member of the group.
HeadTable = Sequence[Range]


class Moving:
    """Tensors on their way to the heads' layout."""

    def __init__(self, transfers: Transfers | None, arrived: list[Tensor]) -> None:
        self._transfers = transfers
        self._arrived = arrived

    def wait(self) -> list[Tensor]:
        """For each tensor what has arrived of it, [G, B, h, D], tokens ascending; views of one buffer."""
        if self._transfers is not None:
            self._transfers.wait()
        return self._arrived


def tokens_to_heads(
    parts: Sequence[Tensor], tables: Sequence[HeadTable], schedule: Schedule, group: dist.ProcessGroup
) -> Moving:
    """All heads of own tokens in, own heads of all tokens out.

    Args:
        parts: tensors [T, B, H, D]; H and D may differ from one to the next.
        tables: the heads that travel to each member, for each part.
        schedule: the rank's split tables.
        group: the ranks of the A2A group.
    """
    if not exchanges_heads(schedule):
        return Moving(None, compact(parts))
    batch = parts[0].shape[1]
    sizes = tuple(part.shape[3] for part in parts)
    slots, sent_sizes = _slots(tuple(map(tuple, tables)), sizes, schedule.tokens * batch)
    sent = parts[0].new_empty(sum(sent_sizes))
    fused.pack(sent, parts, slots)
    received, arrived = _columns(parts[0], batch, tables, sizes, schedule)
    received_sizes = [tokens * batch * received.shape[2] for tokens in schedule.shards]
    return Moving(all_to_all(received.view(-1), sent, received_sizes, sent_sizes, group), arrived)


class Leaving:
    """Tensors that leave the heads' layout: room for them, then on their way.

    Args:
        like: a tensor of their type and device.
        batch: B.
        tables: the heads that travel from each member, for each tensor.
        sizes: D of each.
        schedule: the rank's split tables.
        group: the ranks of the A2A group.
    """

    def __init__(
        self,
        like: Tensor,
        batch: int,
        tables: Sequence[HeadTable],
        sizes: Sequence[int],
        schedule: Schedule,
        group: dist.ProcessGroup,
    ) -> None:
        self._schedule, self._group = schedule, group
        self._tables, self._sizes = tuple(map(tuple, tables)), tuple(sizes)
        self._alone: list[Tensor] = []
        self._transfers: Transfers | None = None
        if exchanges_heads(schedule):
            self._sent, self._parts = _columns(like, batch, tables, sizes, schedule)

    def write(self, sums: Sequence[RowSum]) -> list[Sum]:
        """Write the tensors, [B, h, G, D] each, where they leave from.

        Returns:
            What was written.
        """
        if not exchanges_heads(self._schedule):
            found = [one.result() for one in sums]
            self._alone = [one.value.permute(2, 0, 1, 3) for one in found]
            return found
        places = [part.permute(1, 2, 0, 3) for part in self._parts]
        return [Sum(place, one.write(place)) for place, one in zip(places, sums, strict=True)]

    def start(self) -> None:
        """Send what was written."""
        schedule = self._schedule
        if not exchanges_heads(schedule):
            return
        batch, width = self._sent.shape[1:]
        self._slots, sizes = _slots(self._tables, self._sizes, schedule.tokens * batch)
        self._received = self._sent.new_empty(sum(sizes))
        sent_sizes = [tokens * batch * width for tokens in schedule.shards]
        self._transfers = all_to_all(self._received, self._sent.view(-1), sizes, sent_sizes, self._group)


def arrive(halves: Sequence[Leaving]) -> list[Tensor]:
    """Wait for what has left, and put it together: [T, B, H, D] for each tensor.

    A head that several members hold (a shared KV head) comes from each of them; the sum is taken, added up in
    fp32 (fp64 for fp64).

    Args:
        halves: of the heads; the last may have further tensors.
    """
    last = halves[-1]
    if not exchanges_heads(last._schedule):
        return [part.contiguous() for part in last._alone]
    tokens, batch = last._schedule.tokens, last._sent.shape[1]
    parts = []
    for number, size in enumerate(last._sizes):
        tables = [half._tables[number] for half in halves if number < len(half._tables)]
        heads = max(stop for table in tables for _, stop in table)
        parts.append(last._sent.new_empty(tokens, batch, heads, size))
    for half in halves:
        assert half._transfers is not None, "it was started"
        half._transfers.wait()
        fused.unpack(parts[: len(half._sizes)], half._received, half._slots)
    return parts


def _columns(
    like: Tensor, batch: int, tables: Sequence[HeadTable], sizes: Sequence[int], schedule: Schedule
) -> tuple[Tensor, list[Tensor]]:
    """Room for own heads of all tokens, [G, B, columns], and each tensor's part of it, [G, B, h, D]."""
    heads = [_size(table[schedule.position]) for table in tables]
    widths = [count * size for count, size in zip(heads, sizes, strict=True)]
    buffer = like.new_empty(schedule.group_tokens, batch, sum(widths))
    split = zip(buffer.split(widths, dim=2), heads, sizes, strict=True)
    return buffer, [columns.unflatten(2, (count, size)) for columns, count, size in split]


@lru_cache(maxsize=2**8)  # of the latest schedules
def _slots(
    tables: tuple[tuple[Range, ...], ...], sizes: tuple[int, ...], rows: int
) -> tuple[tuple[Slot, ...], tuple[int, ...]]:
    """Where heads of own tokens lie in a message to, or from, all members; and its elements for each."""
    slots: list[Slot] = []
    elements: list[int] = []
    for member in range(len(tables[0])):
        width = sum(_size(table[member]) * size for table, size in zip(tables, sizes, strict=True))
        offset = sum(elements)
        elements.append(rows * width)
        for part, (table, size) in enumerate(zip(tables, sizes, strict=True)):
            slots.append(Slot(part, table[member], size, offset, width))
            offset += _size(table[member]) * size
    return tuple(slots), tuple(elements)


def _size(heads: Range) -> int:
    return heads[1] - heads[0]
