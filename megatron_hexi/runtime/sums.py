"""Sums of what kernels give for some heads and rows, several terms at a time.

Terms stay as they are, in their own type, until a few of them are together: each is read once then, and the
sum, in fp32 (fp64 for fp64), is not read and written again for each of them.

Shape letters: B batch, h heads, G rows, Q rows of a term, D size of a head.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.runtime import fused
from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.fused.terms import MOST_TERMS, Sum, Term


class RowSum:
    """A sum over blocks: of gradients, or, with their log-sum-exps, of outputs of attention.

    Blocks of attention are merged by their log-sum-exps:

        lse = log(exp(lse_1) + exp(lse_2)),  out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

    computed so that nothing overflows (Rabe and Staats, arXiv 2112.05682; FlashAttention-2, arXiv 2307.08691,
    section 3.1).

    Args:
        shape: B, h, G, D.
        like: a tensor of the terms' type and device.
        few: whether no more than `MOST_TERMS` terms are to be expected for a row. If not, two at a time are
            added up, so that all in all memory is never more than that of as many terms.
        weighed: whether terms have log-sum-exps.
        sinks: with them, logits [h] that take part and have no value.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        like: Tensor,
        *,
        few: bool = True,
        weighed: bool = False,
        sinks: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.like = like
        self._wide = torch.promote_types(like.dtype, torch.float32)
        self._most = MOST_TERMS if few else 2
        self._weighed = weighed
        self._sinks = sinks
        self._terms: list[tuple[Range, Term]] = []
        self._base: Sum | None = None

    def add(self, heads: Range, rows: Rows, value: Tensor, log_sum_exp: Tensor | None = None) -> None:
        """Add a term.

        Args:
            heads: which it has.
            rows: which it has.
            value: [B, heads, Q, D].
            log_sum_exp: [B, heads, Q], of outputs.
        """
        if any(len(terms) == self._most for _, terms in self._by_heads()):
            self._fold()
        self._terms.append((heads, Term(rows, value, log_sum_exp)))

    def write(self, target: Tensor) -> Tensor | None:
        """Write the sum to [B, h, G, D], of any type.

        Returns:
            The log-sum-exp [B, h, G] of outputs.
        """
        found = Sum(target, self._new_log_sum_exp())
        self._combine(found)
        return found.log_sum_exp

    def result(self) -> Sum:
        """The sum in the terms' type: where one term is all of it, that term."""
        if len(self._terms) == 1 and self._base is None and self._sinks is None:
            few, term = self._terms[0]
            if few == (0, self.shape[1]) and term.rows.covers(self.shape[2]):
                return Sum(term.value, term.log_sum_exp)
        batch, heads, rows, size = self.shape
        # Rows first, as all-to-alls deliver.
        value = self.like.new_empty(rows, batch, heads, size).permute(1, 2, 0, 3)
        return Sum(value, self.write(value))

    def _fold(self) -> None:
        """Add up what there is, so that memory does not grow with the number of blocks."""
        target = self._base or Sum(self.like.new_empty(self.shape, dtype=self._wide), self._new_log_sum_exp())
        self._combine(target)
        self._base, self._sinks = target, None
        self._terms.clear()

    def _combine(self, target: Sum) -> None:
        for heads, terms in self._by_heads():
            base = self._base and self._base.of(heads)
            sinks = None if self._sinks is None else self._sinks[slice(*heads)]
            fused.combine(target.of(heads), terms, base, sinks)

    def _by_heads(self) -> list[tuple[Range, list[Term]]]:
        """Terms by heads that have the same ones; together all heads."""
        ends = sorted({0, self.shape[1], *(end for heads, _ in self._terms for end in heads)})
        return [
            (
                (low, high),
                [
                    term.of((low - heads[0], high - heads[0]))
                    for heads, term in self._terms
                    if heads[0] <= low and high <= heads[1]
                ],
            )
            for low, high in itertools.pairwise(ends)
        ]

    def _new_log_sum_exp(self) -> Tensor | None:
        return self.like.new_empty(self.shape[:3], dtype=self._wide) if self._weighed else None
