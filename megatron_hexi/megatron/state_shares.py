"""This rank's part in a layer with a state: which heads it scans, and the exchange that brings them.

Such layers need a group that has the whole sequence: a domain of one group (`options/plan_job.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron.packing import document_ends, packed_shard
from megatron_hexi.megatron.session import Session
from megatron_hexi.plan import Mask
from megatron_hexi.plan.heads import kv_range, state_heads
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Schedule
from megatron_hexi.runtime.column_exchange import ColumnExchange


@dataclass(frozen=True)
class ColumnSection:
    """Adjacent columns of a projection, as many for each head, or for each group of heads."""

    size: int
    is_shared: bool = False


@dataclass(frozen=True)
class StateShare:
    """The heads of a layer with a state, and this rank's.

    Args:
        heads: heads of the layer (on this tensor-parallel rank).
    """

    session: Session
    heads: int
    groups: int

    @property
    def shared_by(self) -> int:
        """Number of heads that share a group."""
        return self.heads // self.groups

    @property
    def own(self) -> Range:
        """This rank's heads."""
        schedule = self.session.attention.schedules()
        return state_heads(schedule.heads, self.heads)[schedule.position]

    @property
    def own_groups(self) -> Range:
        """The groups that this rank's heads read."""
        return kv_range(self.own, self.shared_by)

    def ranges(self, sections: Sequence[ColumnSection]) -> list[Range]:
        """Return the range of this rank in each section, counted from the section's first column."""
        return [
            _scaled(self.own_groups if section.is_shared else self.own, section.size) for section in sections
        ]

    def cut(self, weight: Tensor, sections: Sequence[ColumnSection]) -> Tensor:
        """Return this rank's part of a weight whose first axis has these sections.

        It is cut in the forward pass, so its gradient is one of the whole weight, 0 in other ranks' parts.
        """
        parts = weight.split(self._sizes(sections))
        cut = [part[start:stop] for part, (start, stop) in zip(parts, self.ranges(sections), strict=True)]
        return cut[0] if len(cut) == 1 else torch.cat(cut)

    def exchange(self, sections: Sequence[ColumnSection], packed: Any = None) -> ColumnExchange:
        """Return the exchange of a projection with these sections; `packed` has the ends of documents."""
        schedule = self._schedule(packed)
        columns = _columns(schedule.heads, self.heads, self.groups, tuple(sections))
        return ColumnExchange(schedule.shards, schedule.position, columns, self.session.attention.a2a_group)

    def rows(self, packed: Any = None) -> int:
        """Return the number of this rank's rows outside, with padding."""
        return packed_shard(self.session, document_ends(packed)).shard.rows

    def _schedule(self, packed: Any) -> Schedule:
        if packed is None:
            return self.session.attention.schedules()
        documents = packed_shard(self.session, document_ends(packed)).documents
        return self.session.attention.schedules(Mask(documents=documents))

    def _sizes(self, sections: Sequence[ColumnSection]) -> list[int]:
        return _sizes(sections, self.heads, self.groups)


def document_numbers(ends: Tensor, length: int) -> Tensor:
    """Return the number of each token's document in the whole sequence, [1, S].

    `ends` are 0 and the end of each document, ascending; `length` is S.
    """
    places = torch.arange(length, dtype=ends.dtype, device=ends.device)
    return (
        torch.searchsorted(ends.flatten()[1:].contiguous(), places, right=True).to(torch.int32).unsqueeze(0)
    )


def unused(weights: Sequence[Tensor]) -> Tensor:
    """Return a zero that depends on weights which a rank without heads does not use.

    Their gradients are then zeros, and not missing: Megatron waits for the gradient of every weight.
    """
    return torch.stack([weight[:0].sum().float() for weight in weights]).sum()


@functools.cache  # the same for all layers
def _columns(
    attention: tuple[Range, ...], heads: int, groups: int, sections: tuple[ColumnSection, ...]
) -> tuple[tuple[Range, ...], ...]:
    """Return the ranges of columns that each member reads, a range a section."""
    offsets = list(itertools.accumulate(_sizes(sections, heads, groups), initial=0))[:-1]
    return tuple(
        tuple(
            (offset + start, offset + stop)
            for offset, section in zip(offsets, sections, strict=True)
            for start, stop in [
                _scaled(kv_range(own, heads // groups) if section.is_shared else own, section.size)
            ]
        )
        for own in state_heads(attention, heads)
    )


def _sizes(sections: Sequence[ColumnSection], heads: int, groups: int) -> list[int]:
    return [section.size * (groups if section.is_shared else heads) for section in sections]


def _scaled(span: Range, size: int) -> Range:
    return span[0] * size, span[1] * size
