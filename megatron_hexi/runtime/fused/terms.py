"""Slots of heads in a message, and how many terms a fused sum has."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.plan.model import Range

#: How many terms one operation adds up; a fused one has a pointer for each.
MOST_TERMS = 4


@dataclass(frozen=True)
class Slot:
    """Where heads of a tensor [T, B, heads, D] lie in a flat one.

    Args:
        part: number of the tensor.
        heads: which of its heads.
        size: of a head.
        offset: of the first element.
        stride: elements from one row (of tokens and batch) to the next.
    """

    part: int
    heads: Range
    size: int
    offset: int
    stride: int
