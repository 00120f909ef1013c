"""The all-to-all of a layer with a state: all columns of own tokens to own columns of all tokens, and back.

A column is a channel of a projection's output. The message to a member is made of the ranges of columns that
it reads; two members may read the same, whose gradients are then summed.

Shape letters: T tokens of the shard, L its rows with padding, G tokens of the group, B batch, C all columns,
c own columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.wire import all_to_all


@dataclass(frozen=True)
class ColumnExchange:
    """The sizes of a group's messages: tokens that each member holds, and columns that it reads.

    Args:
        shards: tokens of each member of the group; in this order they are the sequence.
        position: the rank's own place among the members.
        columns: ranges of columns that each member reads, ascending.
    """

    shards: tuple[int, ...]
    position: int
    columns: tuple[tuple[Range, ...], ...]
    group: dist.ProcessGroup

    def to_columns(self, rows: Tensor) -> Tensor:
        """Return own columns of all tokens, [G, B, c].

        Args:
            rows: [L, B, C]; rows after the T tokens are not read, and have no gradient.
        """
        columns: Tensor = _ToColumns.apply(rows, self)
        return columns

    def to_rows(self, columns: Tensor, rows: int) -> Tensor:
        """Return all columns of own tokens, [L, B, C], 0 in padding; C ends with the last one read.

        Args:
            columns: [G, B, c].
            rows: L.
        """
        result: Tensor = _ToRows.apply(columns, self, rows)
        return result

    def _send_rows(self, rows: Tensor) -> Tensor:
        """Return [G, B, c] of [L, B, C]."""
        tokens, batch = self.shards[self.position], rows.shape[1]
        own = rows[:tokens]
        parts = [torch.cat([own[..., a:b] for a, b in ranges], -1).flatten() for ranges in self.columns]
        width = _width(self.columns[self.position])
        if len(self.shards) == 1:
            return parts[0].view(tokens, batch, width)
        received = rows.new_empty(sum(self.shards), batch, width)
        sizes = [count * batch * width for count in self.shards]
        sent_sizes = [part.numel() for part in parts]
        all_to_all(received.view(-1), torch.cat(parts), sizes, sent_sizes, self.group).wait()
        return received

    def _send_columns(self, columns: Tensor, rows: int, width: int) -> Tensor:
        """Return [L, B, C] of [G, B, c]; columns that several members send are summed in fp32 at least."""
        tokens, batch = self.shards[self.position], columns.shape[1]
        sizes = [tokens * batch * _width(ranges) for ranges in self.columns]
        received = columns.flatten()
        if len(self.shards) > 1:
            sent, received = received, columns.new_empty(sum(sizes))
            sent_sizes = [count * batch * columns.shape[2] for count in self.shards]
            all_to_all(received, sent, sizes, sent_sizes, self.group).wait()
        narrow = columns.dtype.itemsize < 4 and self._overlap
        total = columns.new_zeros(rows, batch, width, dtype=torch.float32 if narrow else None)
        for part, ranges in zip(received.split(sizes), self.columns, strict=True):
            pieces = part.view(tokens, batch, _width(ranges)).split([b - a for a, b in ranges], -1)
            for piece, (start, stop) in zip(pieces, ranges, strict=True):
                total[:tokens, :, start:stop] += piece
        return total.to(columns.dtype)

    @property
    def _overlap(self) -> bool:
        """Whether two members read the same column."""
        ranges = sorted(span for member in self.columns for span in member if span[0] < span[1])
        return any(later[0] < earlier[1] for earlier, later in itertools.pairwise(ranges))


class _ToColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: ColumnExchange) -> Tensor:
        ctx.exchange, ctx.rows, ctx.width = exchange, rows.shape[0], rows.shape[2]
        return exchange._send_rows(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange._send_columns(grads[0].contiguous(), ctx.rows, ctx.width), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, columns: Tensor, exchange: ColumnExchange, rows: int) -> Tensor:
        ctx.exchange = exchange
        width = max(stop for ranges in exchange.columns for _, stop in ranges)
        return exchange._send_columns(columns.contiguous(), rows, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange._send_rows(grads[0]), None, None


def _width(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)
