"""The ragged all-to-all between the two layouts of an attention layer.

Outside attention a rank holds all heads of its own tokens; inside, its own heads of all the group's
tokens. The send from member i to member j is tokens_i x heads_j: both axes are ragged. Several tensors
(query, key and value) travel as columns of one message, so one collective moves them all. Nothing is
waited for here: what travels is wanted later than it leaves.

Shape letters: T tokens of the shard, G tokens of the group, B batch, H all heads, h own heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.plan.traffic import exchanges_heads
from megatron_hexi.runtime.wire import Transfers, all_to_all

#: For one tensor: the heads of each member of the group.
HeadTable = Sequence[Range]


class Moving:
    """Tensors on their way from one layout to the other."""

    def __init__(self, transfers: Transfers | None, arrived: list[list[Tensor]]) -> None:
        self._transfers = transfers
        self._arrived = arrived

    def wait(self) -> list[list[Tensor]]:
        """For each tensor what has arrived of it, one piece or a piece from each member."""
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

    Returns:
        For each part one tensor [G, B, h, D], tokens ascending; views of one buffer.
    """
    if not exchanges_heads(schedule):
        return Moving(None, [[part] for part in parts])
    batch = parts[0].shape[1]
    pieces = []
    for member in range(len(schedule.members)):
        columns = [
            part[:, :, slice(*table[member])].flatten(2) for part, table in zip(parts, tables, strict=True)
        ]
        pieces.append(torch.cat(columns, dim=2).flatten())
    widths = [
        _size(table[schedule.position]) * part.shape[3] for part, table in zip(parts, tables, strict=True)
    ]
    received = parts[0].new_empty(schedule.group_tokens, batch, sum(widths))
    sizes = [tokens * batch * sum(widths) for tokens in schedule.shards]
    sent = [piece.numel() for piece in pieces]
    transfers = all_to_all(received.view(-1), torch.cat(pieces), sizes, sent, group)
    arrived = [
        [columns.unflatten(2, (_size(table[schedule.position]), part.shape[3]))]
        for columns, part, table in zip(received.split(widths, dim=2), parts, tables, strict=True)
    ]
    return Moving(transfers, arrived)


def heads_to_tokens(
    parts: Sequence[Tensor], tables: Sequence[HeadTable], schedule: Schedule, group: dist.ProcessGroup
) -> Moving:
    """Own heads of all tokens in, heads of own tokens out: the way back.

    Args:
        parts: tensors [G, B, h, D].
        tables: the heads that travel from each member, for each part.
        schedule: the rank's split tables.
        group: the ranks of the A2A group.

    Returns:
        For each part a tensor [T, B, h, D] from each member; `join_heads` makes one of them.
    """
    if not exchanges_heads(schedule):
        return Moving(None, [[part] for part in parts])
    batch = parts[0].shape[1]
    sent = torch.cat([part.flatten(2) for part in parts], dim=2)
    sent_sizes = [tokens * batch * sent.shape[2] for tokens in schedule.shards]
    members = range(len(schedule.members))
    widths = [
        [_size(table[member]) * part.shape[3] for part, table in zip(parts, tables, strict=True)]
        for member in members
    ]
    sizes = [schedule.tokens * batch * sum(widths[member]) for member in members]
    received = sent.new_empty(sum(sizes))
    transfers = all_to_all(received, sent.flatten(), sizes, sent_sizes, group)
    columns = [
        piece.view(schedule.tokens, batch, sum(widths[member])).split(widths[member], dim=2)
        for member, piece in zip(members, received.split(sizes), strict=True)
    ]
    arrived = [
        [columns[member][number].unflatten(2, (_size(table[member]), part.shape[3])) for member in members]
        for number, (part, table) in enumerate(zip(parts, tables, strict=True))
    ]
    return Moving(transfers, arrived)


def join_heads(pieces: Sequence[Tensor], table: HeadTable) -> Tensor:
    """Put pieces [T, B, h, D] where their heads belong: [T, B, H, D].

    A head that several members hold (a shared KV head) comes from each of them; the sum is returned,
    added up in fp32 (fp64 for fp64).

    Args:
        pieces: what has arrived.
        table: the heads of each piece; together all heads.
    """
    if len(pieces) == 1:
        return pieces[0]
    heads = max(stop for _, stop in table)
    tokens, batch, _, head_dim = pieces[0].shape
    shared = sum(map(_size, table)) > heads
    dtype = pieces[0].dtype if not shared else torch.promote_types(pieces[0].dtype, torch.float32)
    make = pieces[0].new_zeros if shared else pieces[0].new_empty
    whole = make(tokens, batch, heads, head_dim, dtype=dtype)
    for piece, place in zip(pieces, table, strict=True):
        target = whole[:, :, slice(*place)]
        target.add_(piece) if shared else target.copy_(piece)
    return whole.to(pieces[0].dtype)


def _size(heads: Range) -> int:
    return heads[1] - heads[0]
