"""Compute keys and values of multi-latent attention from exchanged latent columns, and the gradients.

If latent columns are exchanged in place of keys and values, a rank receives the columns of each token once,
however many heads it computes, and computes its heads' keys and values from them:

    key of a head   = [columns W_key, rotary columns]
    value of a head = columns W_value

In the backward pass it computes keys and values again, and turns their gradients into gradients of the
columns and a summand of the matrix's gradient. Each use of a head's part of the matrix is on one rank, so the
sum over ranks, as for any weight, is the whole gradient.

Shape letters: B batch, S tokens, h heads, C latent columns, R rotary columns, N columns of a key without
positions, V columns of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hexi.plan.heads import HeadSpan
from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.compiled import Recorder, Value


class LatentSizes(NamedTuple):
    """Numbers of columns of one head's key and value.

    Args:
        plain: key columns without positions (N).
        rotary: key columns with rotary positions (R).
        value: value columns (V).
    """

    plain: int
    rotary: int
    value: int


class Expansion:
    """A recorder of the products that compute keys and values from latent columns, and of their gradients.

    Args:
        matrix: matrix [H (N + V), C], with the key rows and then the value rows of each head.
        first: number of the rank's first head.
    """

    def __init__(self, recorder: Recorder, matrix: Value, sizes: LatentSizes, first: int) -> None:
        self._recorder = recorder
        self._matrix = matrix
        self._sizes = sizes
        self._first = first
        self._gradient: Value | None = None

    def keys(
        self, spans: Sequence[HeadSpan], columns: Value, rotary: Value
    ) -> tuple[list[HeadSpan], Value, Value]:
        """Record the computation of keys and values of consecutive heads from latent columns.

        Args:
            spans: spans of the heads, counted from the rank's first head.
            columns: latent columns [B, 1, S, C].
            rotary: rotary columns [B, 1, S, R].

        Returns:
            Spans in which each query head has its own KV head, counted from the first of these heads; keys
            [B, h, S, N + R]; values [B, h, S, V].
        """
        batch, _, rows, _ = columns.shape
        heads = spans[0].queries[0], spans[-1].queries[1]
        shapes = [
            (batch, heads[1] - heads[0], rows, size)
            for size in (self._sizes.plain + self._sizes.rotary, self._sizes.value)
        ]
        key, value = self._recorder.make_each(
            partial(_expanded, self._sizes), shapes, columns, rotary, self._of_heads(self._matrix, heads)
        )
        return [HeadSpan(heads, (0, heads[1] - heads[0]))], key, value

    def gradients(
        self, columns: Value, key: Value, value: Value, spans: Sequence[HeadSpan]
    ) -> tuple[Value, Value]:
        """Return the gradients of latent and rotary columns, and add a summand to the matrix's gradient.

        Args:
            columns: latent columns [B, 1, S, C].
            key: gradients of keys, [B, h, S, N + R].
            value: gradients of values, [B, h, S, V].
            spans: spans of the heads, counted from the rank's first head.
        """
        recorder, sizes = self._recorder, self._sizes
        heads = spans[0].queries[0], spans[-1].queries[1]
        if self._gradient is None:
            zeros = partial(torch.zeros, self._matrix.shape, dtype=recorder.wide, device=recorder.device)
            self._gradient = recorder.make(zeros, self._matrix.shape)
        shapes = [columns.shape, (*columns.shape[:3], sizes.rotary)]
        of_columns, of_rotary = recorder.make_each(
            partial(_contracted, sizes),
            shapes,
            columns,
            key,
            value,
            self._of_heads(self._matrix, heads),
            self._of_heads(self._gradient, heads),
        )
        return of_columns, of_rotary

    def matrix_gradient(self) -> Value:
        """Return the rank's summand of the matrix's gradient, in the matrix's shape and type."""
        recorder, shape = self._recorder, self._matrix.shape
        if self._gradient is None:
            return recorder.make(torch.zeros_like, shape, self._matrix)
        return recorder.make(partial(Tensor.to, dtype=recorder.dtype), shape, self._gradient)

    def _of_heads(self, matrix: Value, heads: Range) -> Value:
        rows = self._sizes.plain + self._sizes.value
        return matrix.cut(((self._first + heads[0]) * rows, (self._first + heads[1]) * rows))


def _expanded(sizes: LatentSizes, columns: Tensor, rotary: Tensor, matrix: Tensor) -> list[Tensor]:
    both = (columns.squeeze(1) @ matrix.t()).unflatten(2, (-1, sizes.plain + sizes.value)).transpose(1, 2)
    plain, value = both.split([sizes.plain, sizes.value], dim=3)
    key = torch.cat([plain, rotary.expand(-1, plain.shape[1], -1, -1)], dim=3)
    return [key, value.contiguous()]


def _contracted(
    sizes: LatentSizes, columns: Tensor, key: Tensor, value: Tensor, matrix: Tensor, total: Tensor
) -> list[Tensor]:
    plain, rotary = key.split([sizes.plain, sizes.rotary], dim=3)
    both = torch.cat([plain, value], dim=3).transpose(1, 2).flatten(2)
    total += both.flatten(0, 1).t() @ columns.squeeze(1).flatten(0, 1)
    wide = torch.promote_types(rotary.dtype, torch.float32)
    return [(both @ matrix).unsqueeze(1), rotary.sum(1, keepdim=True, dtype=wide).to(rotary.dtype)]
