"""Fused operations in torch, term by term: the reference, and the implementation for CPUs.

Shape letters: B batch, h heads, G rows of the whole, Q rows of a part, D size of a head, T tokens of a shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.runtime.call_rows import Rows

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


def combine(
    rows: Sequence[Rows],
    target: Tensor,
    total: Tensor | None,
    base: Tensor | None,
    base_total: Tensor | None,
    sinks: Tensor | None,
    *parts: Tensor,
) -> None:
    """Write the sum of terms to `target`, accumulated in fp32 (fp64 for fp64); rows without a term become 0.

    With log-sum-exps the sum is attention over the keys of all terms: `lse = log(sum exp(lse_i))` and
    `out = sum out_i exp(lse_i - lse)`.

    Args:
        rows: rows of `target` to which each term is added; at most `MOST_TERMS` terms.
        target: tensor for the sum, [B, h, G, D], of any type.
        total: tensor for the merged log-sum-exp, [B, h, G] in fp32 (fp64 for fp64); ``None``: a plain sum.
        base: a further term with all rows; may be `target`.
        base_total: log-sum-exp of `base`.
        sinks: logits [h] that take part in the log-sum-exp and have no value.
        parts: terms [B, h, Q, D]; with `total`, followed by the terms' log-sum-exps [B, h, Q].
    """
    wide = torch.promote_types(target.dtype, torch.float32)
    values, totals = parts[: len(rows)], parts[len(rows) :]
    if base is not None:
        rows, values = (Rows((0, target.shape[2])), *rows), (base, *values)
        totals = totals if base_total is None else (base_total, *totals)
    weights: Sequence[Tensor | None] = [None] * len(rows)
    if total is not None:
        weights = _weights(total, rows, totals, sinks)
    terms = list(zip(rows, values, weights, strict=True))
    if not rows or not rows[0].covers(target.shape[2]):
        sums = torch.zeros_like(target, dtype=wide)
    else:
        _, value, weight = terms.pop(0)
        if weight is not None:
            sums = value * weight
        elif target.dtype == wide or not terms:
            sums = target.copy_(value)
        else:
            sums = value.to(wide)
    for term_rows, value, weight in terms:
        if weight is None:
            term_rows.add(sums, value)
        elif term_rows.index is None:
            term_rows.taken(sums).addcmul_(value, weight)
        else:
            term_rows.add(sums, value * weight)
    if sums is not target:
        target.copy_(sums)


def _weights(
    total: Tensor, rows: Sequence[Rows], parts: Sequence[Tensor], sinks: Tensor | None
) -> list[Tensor]:
    """Return the factor of each term, [B, h, Q, 1], and write the log-sum-exp of all terms to `total`."""
    log_sum_exp = torch.full_like(total, -torch.inf)
    if sinks is not None:
        log_sum_exp[:] = sinks[:, None]
    for term_rows, part in zip(rows, parts, strict=True):
        # torch.logaddexp, so that nothing overflows
        term_rows.put(log_sum_exp, torch.logaddexp(term_rows.taken(log_sum_exp), part))
    weights = [
        torch.exp(part - term_rows.taken(log_sum_exp))[..., None]
        for term_rows, part in zip(rows, parts, strict=True)
    ]
    total.copy_(log_sum_exp)
    return weights


def copy_rows(rows: Rows, target: Tensor, source: Tensor) -> None:
    """Copy some rows of [B, h, G, D] to [B, h, Q, D]."""
    target.copy_(rows.taken(source))


def make_pack(slots: Sequence[Slot], heads: Sequence[int], device: torch.device) -> Callable[..., None]:
    """Return a function that writes heads of tensors to a flat message.

    Returns:
        A function of the flat message and the tensors, [T, B, heads, D].
    """
    return partial(_pack, slots)


def _pack(slots: Sequence[Slot], flat: Tensor, *parts: Tensor) -> None:
    for slot in slots:
        part = parts[slot.part][:, :, slice(*slot.heads)]
        _lying(flat, part, slot).copy_(part)


def make_unpack(slots: Sequence[Slot], heads: Sequence[int], device: torch.device) -> Callable[..., None]:
    """Return a function that reads heads of tensors from a flat message; copies of a head are summed in fp32.

    Arguments and the function returned are those of `make_pack`.
    """
    slots_of_part = [[slot for slot in slots if slot.part == number] for number in range(len(heads))]
    return partial(_unpack, [(part_slots, _overlap(part_slots)) for part_slots in slots_of_part])


def _unpack(slots: Sequence[tuple[Sequence[Slot], bool]], flat: Tensor, *parts: Tensor) -> None:
    for part, (part_slots, is_shared) in zip(parts, slots, strict=True):
        wide = torch.promote_types(part.dtype, torch.float32)
        total = torch.zeros_like(part, dtype=wide) if is_shared else part
        for slot in part_slots:
            target = total[:, :, slice(*slot.heads)]
            piece = _lying(flat, target, slot)
            target.add_(piece) if is_shared else target.copy_(piece)
        for slot in part_slots if is_shared else ():
            part[:, :, slice(*slot.heads)] = total[:, :, slice(*slot.heads)]


def _overlap(slots: Sequence[Slot]) -> bool:
    """Whether some head of a tensor lies in several slots."""
    ends = sorted(slot.heads for slot in slots if slot.heads[0] < slot.heads[1])
    return any(first[1] > second[0] for first, second in itertools.pairwise(ends))


def _lying(flat: Tensor, part: Tensor, slot: Slot) -> Tensor:
    """Return a view of the heads of a slot, [T, B, heads, D]."""
    _, batch, _, size = part.shape
    steps = batch * slot.stride, slot.stride, size, 1
    return flat.as_strided(part.shape, steps, flat.storage_offset() + slot.offset)
