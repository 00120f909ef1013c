"""Sum the results of attention kernels by heads and rows, several terms at a time.

Terms are kept in their own type until there are a few. They are then added in one operation, so that the sum,
in fp32 (fp64 for fp64), is not read and written again for each term.

Shape letters: B batch, h heads, G rows, Q rows of a term, D size of a head.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple

from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.compiled import BufferPlace, Recorder, Shape, Value
from megatron_hexi.runtime.fused.plain import MOST_TERMS


class Term(NamedTuple):
    """One term of a `RowSum`: a tensor, and the heads and rows of the sum to which it is added.

    Args:
        value: the term, [B, heads, Q, D].
        log_sum_exp: log-sum-exp of the term, [B, heads, Q], for an output of attention; otherwise ``None``.
    """

    heads: Range
    rows: Rows
    value: Value
    log_sum_exp: Value | None


class RowSum:
    """A sum over blocks: a plain sum of gradients, or attention outputs merged by their log-sum-exps.

    Blocks of attention are merged by their log-sum-exps:

        lse = log(exp(lse_1) + exp(lse_2)),  out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

    computed so that nothing overflows (Rabe and Staats, arXiv 2112.05682; FlashAttention-2, arXiv 2307.08691,
    section 3.1).

    Args:
        shape: shape of the sum, [B, h, G, D].
        few: whether a row has at most `MOST_TERMS` terms. Otherwise terms are added two at a time, so that
            waiting terms never need more memory than `MOST_TERMS` terms.
        sinks: logits [h] that take part in the log-sum-exp and have no value.
    """

    def __init__(
        self,
        recorder: Recorder,
        shape: Shape,
        *,
        few: bool = True,
        weighed: bool = False,
        sinks: Value | None = None,
    ) -> None:
        self.shape = shape
        self._recorder = recorder
        self._most = MOST_TERMS if few else 2
        self._weighed = weighed
        self._sinks = sinks
        self._terms: list[Term] = []
        self._base: tuple[Value, Value | None] | None = None

    def add(self, heads: Range, rows: Rows, value: Value, log_sum_exp: Value | None = None) -> None:
        """Add a term to the sum; the arguments are the fields of `Term`."""
        if any(len(terms) == self._most for _, terms in self._by_heads()):
            self._fold()
        self._terms.append(Term(heads, rows, value, log_sum_exp))

    def write(self, target: Value) -> Value | None:
        """Write the sum to a tensor [B, h, G, D] of any type; return log-sum-exps [B, h, G], or ``None``."""
        total = self._new_log_sum_exp()
        self._combine(target, total)
        return total

    def result(self) -> tuple[Value, Value | None]:
        """Return the sum in the terms' type, and its log-sum-exp; a single term is returned as it is."""
        if len(self._terms) == 1 and self._base is None and self._sinks is None:
            heads, rows, value, log_sum_exp = self._terms[0]
            if heads == (0, self.shape[1]) and rows.covers(self.shape[2]):
                return value, log_sum_exp
        batch, heads_count, rows_count, size = self.shape
        # Rows first, as all-to-alls arrive.
        strides = heads_count * size, size, batch * heads_count * size, 1
        buffer = self._recorder.empty(rows_count, batch, heads_count, size)
        (target,) = self._recorder.views(buffer, [BufferPlace(self.shape, strides)])
        return target, self.write(target)

    def _fold(self) -> None:
        """Add the waiting terms, so that memory does not grow with the number of blocks."""
        recorder = self._recorder
        target, total = self._base or (
            recorder.empty(*self.shape, dtype=recorder.wide),
            self._new_log_sum_exp(),
        )
        self._combine(target, total)
        self._base, self._sinks = (target, total), None
        self._terms.clear()

    def _combine(self, target: Value, total: Value | None) -> None:
        recorder, (base, base_total) = self._recorder, self._base or (None, None)
        for heads, terms in self._by_heads():
            whole = [value and value.cut(None, heads) for value in (target, total, base, base_total)]
            within = [((heads[0] - term.heads[0], heads[1] - term.heads[0]), term) for term in terms]
            values = [term.value.cut(None, part) for part, term in within]
            totals = [term.log_sum_exp.cut(None, part) for part, term in within if term.log_sum_exp]
            run = partial(recorder.fused.combine, [term.rows for term in terms])
            recorder.do(run, *whole, self._sinks and self._sinks.cut(heads), *values, *totals)

    def _by_heads(self) -> list[tuple[Range, list[Term]]]:
        """Divide all heads into ranges that have the same terms; return each range with its terms."""
        ends = sorted({0, self.shape[1], *(end for term in self._terms for end in term.heads)})
        return [
            (
                (low, high),
                [term for term in self._terms if term.heads[0] <= low and high <= term.heads[1]],
            )
            for low, high in itertools.pairwise(ends)
        ]

    def _new_log_sum_exp(self) -> Value | None:
        return self._recorder.empty(*self.shape[:3], dtype=self._recorder.wide) if self._weighed else None
