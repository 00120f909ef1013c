"""A causal depthwise convolution over the rows of a domain, of which each rank holds some.

A rank receives the few rows before its own (`plan.halo`), so all of its channels stay where they are: the
messages do not grow with the sequence. Shape letters: T tokens of the shard, L its rows with padding, B
batch, C channels, K taps, R rows received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hexi.plan.halo import Halo
from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.wire import all_to_all


class HaloRows:
    """A halo's tables on a device.

    Args:
        group: process group of the domain, in the order of the halo's ranks; ``None``: one rank has all rows.
    """

    def __init__(self, halo: Halo, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.reach, self.group = halo.reach, None if halo.is_empty else group
        self.tokens = sum(stop - start for start, stop in halo.own)
        self.sends, self.receives = [len(rows) for rows in halo.sends], list(halo.receives)
        self.sent = torch.tensor([row for rows in halo.sends for row in rows], dtype=torch.int64).to(device)
        self.arranged, self.own = (_places(ranges).to(device) for ranges in (halo.arranged, halo.own))

    def exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Return the rows that other ranks send, of rows [N, B, C] in the order of the ranks."""
        _, *rest = rows.shape
        received = rows.new_empty(sum(receives), *rest)
        size = rest[0] * rest[1]
        come, go = ([size * count for count in counts] for counts in (receives, sends))
        assert self.group is not None, "asked only where a rank sends something"
        all_to_all(received.view(-1), rows.contiguous().view(-1), come, go, self.group).wait()
        return received


def short_convolution(rows: Tensor, weight: Tensor, halo: HaloRows) -> Tensor:
    """Return sum over j of weight[:, K - 1 - j] x the row j before, [L, B, C]; 0 in padding.

    Sums are in fp32 at least.

    Args:
        rows: [L, B, C]; rows after the T tokens are not read, and have no gradient.
        weight: [C, K], the tap of the row itself last, as in `torch.nn.functional.conv1d`.
    """
    received = rows[:0] if halo.group is None else _Halo.apply(rows, halo)
    zeros = rows.new_zeros(1, *rows.shape[1:])
    arranged = torch.cat([rows[: halo.tokens], received, zeros]).index_select(0, halo.arranged)
    count = max(0, len(arranged) - halo.reach)
    taps = weight.to(torch.promote_types(weight.dtype, torch.float32)).unbind(1)
    total = arranged[:count] * taps[0]
    for place, tap in enumerate(taps[1:], 1):
        total = total + arranged[place : place + count] * tap
    own = total.to(rows.dtype).index_select(0, halo.own - halo.reach)
    padding = len(rows) - halo.tokens
    return torch.nn.functional.pad(own, (0, 0, 0, 0, 0, padding)) if padding else own


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, halo: HaloRows) -> Tensor:
        ctx.halo, ctx.shape = halo, rows.shape
        return halo.exchange(rows.index_select(0, halo.sent), halo.sends, halo.receives)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        halo: HaloRows = ctx.halo
        returned = halo.exchange(grads[0], halo.receives, halo.sends)
        total = returned.new_zeros(ctx.shape, dtype=torch.promote_types(returned.dtype, torch.float32))
        total.index_add_(0, halo.sent, returned.to(total.dtype))
        return total.to(returned.dtype), None


def _places(ranges: Sequence[Range]) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in ranges)])
