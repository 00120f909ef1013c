"""Slots of heads in a message, and the number of terms in a fused sum."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.plan.model import Range

#: Largest number of terms that one operation adds; a fused operation has a pointer for each term.
MOST_TERMS = 4


@dataclass(frozen=True)
class Slot:
    """The place of heads of a tensor [T, B, heads, D] in a flat message.

    Args:
        offset: offset of the slot's first element in the message.
        stride: elements from one row (of tokens and batch) to the next.
    """

    part: int
    heads: Range
    size: int
    offset: int
    stride: int
