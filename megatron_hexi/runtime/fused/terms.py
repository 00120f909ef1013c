"""What fused operations are given.

Shape letters: B batch, h heads, G rows of the whole, Q rows of a part, D size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.call_rows import Rows

#: How many terms one operation adds up; a fused one has a pointer for each.
MOST_TERMS = 4


@dataclass(frozen=True)
class Sum:
    """A sum of all rows.

    Args:
        value: [B, h, G, D].
        log_sum_exp: [B, h, G] in fp32 (fp64 for fp64) for outputs of attention; ``None``: a plain sum.
    """

    value: Tensor
    log_sum_exp: Tensor | None = None

    def of(self, heads: Range) -> Self:
        """That of some heads."""
        lse = self.log_sum_exp
        return type(self)(self.value[:, slice(*heads)], None if lse is None else lse[:, slice(*heads)])


@dataclass(frozen=True)
class Term:
    """A part of a sum.

    Args:
        rows: which rows of the sum it has.
        value: [B, h, Q, D].
        log_sum_exp: [B, h, Q], where the sum has one.
    """

    rows: Rows
    value: Tensor
    log_sum_exp: Tensor | None = None

    def of(self, heads: Range) -> Self:
        """That of some heads."""
        lse = self.log_sum_exp
        few = None if lse is None else lse[:, slice(*heads)]
        return type(self)(self.rows, self.value[:, slice(*heads)], few)


@dataclass(frozen=True)
class Slot:
    """Where heads of a tensor [T, B, heads, D] lie in a flat one.

    Args:
        part: the tensor, by its number.
        heads: which.
        size: of a head.
        offset: of the first element.
        stride: elements from one row (of tokens and batch) to the next.
    """

    part: int
    heads: Range
    size: int
    offset: int
    stride: int
