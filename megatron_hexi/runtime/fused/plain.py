"""Fused operations in torch, term by term: the reference, and what runs on CPUs.

Shape letters: B batch, h heads, G rows of the whole, Q rows of a part, D size of a head, T tokens of a shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.fused.terms import Slot


def combine(
    rows: Sequence[Rows],
    target: Tensor,
    total: Tensor | None,
    base: Tensor | None,
    base_total: Tensor | None,
    sinks: Tensor | None,
    *parts: Tensor,
) -> None:
    """Write the sum of terms, added up in fp32 (fp64 for fp64); rows that no term has become 0.

    With log-sum-exps it is attention over all keys of the terms: `lse = log(sum exp(lse_i))` and
    `out = sum out_i exp(lse_i - lse)`.

    Args:
        rows: of each term, at most `MOST_TERMS`.
        target: where to, [B, h, G, D], of any type.
        total: where the log-sum-exp goes, [B, h, G] in fp32 (fp64 for fp64); ``None``: a plain sum.
        base: one more term, of all rows; may be the target.
        base_total: its log-sum-exp.
        sinks: logits [h] that take part in the log-sum-exp and have no value.
        parts: the terms, [B, h, Q, D]; with `total` their log-sum-exps behind them, [B, h, Q].
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
    for some, value, weight in terms:
        if weight is None:
            some.add(sums, value)
        elif some.index is None:
            some.taken(sums).addcmul_(value, weight)
        else:
            some.add(sums, value * weight)
    if sums is not target:
        target.copy_(sums)


def _weights(
    total: Tensor, rows: Sequence[Rows], parts: Sequence[Tensor], sinks: Tensor | None
) -> list[Tensor]:
    """The factor of each term, [B, h, Q, 1]; the log-sum-exp of all terms goes to `total`."""
    found = torch.full_like(total, -torch.inf)
    if sinks is not None:
        found[:] = sinks[:, None]
    for some, part in zip(rows, parts, strict=True):
        # torch.logaddexp, so that nothing overflows
        some.put(found, torch.logaddexp(some.taken(found), part))
    weights = [torch.exp(part - some.taken(found))[..., None] for some, part in zip(rows, parts, strict=True)]
    total.copy_(found)
    return weights


def copy_rows(rows: Rows, target: Tensor, source: Tensor) -> None:
    """Write some rows of [B, h, G, D] to [B, h, Q, D]."""
    target.copy_(rows.taken(source))


def pack(slots: Sequence[Slot], heads: Sequence[int], device: torch.device) -> Callable[..., None]:
    """Write heads of tensors to a flat one, which is then sent.

    Args:
        slots: which heads lie where.
        heads: how many each tensor has.
        device: of the tensors.

    Returns:
        A function of the flat tensor and the others, [T, B, heads, D].
    """
    return partial(_pack, slots)


def _pack(slots: Sequence[Slot], flat: Tensor, *parts: Tensor) -> None:
    for slot in slots:
        part = parts[slot.part][:, :, slice(*slot.heads)]
        _lying(flat, part, slot).copy_(part)


def unpack(slots: Sequence[Slot], heads: Sequence[int], device: torch.device) -> Callable[..., None]:
    """Write heads of tensors from a flat one; a head that lies there several times is added up in fp32.

    Arguments and the function returned are those of `pack`.
    """
    each = [[slot for slot in slots if slot.part == number] for number in range(len(heads))]
    return partial(_unpack, [(some, _overlap(some)) for some in each])


def _unpack(slots: Sequence[tuple[Sequence[Slot], bool]], flat: Tensor, *parts: Tensor) -> None:
    for part, (some, is_shared) in zip(parts, slots, strict=True):
        wide = torch.promote_types(part.dtype, torch.float32)
        total = torch.zeros_like(part, dtype=wide) if is_shared else part
        for slot in some:
            target = total[:, :, slice(*slot.heads)]
            piece = _lying(flat, target, slot)
            target.add_(piece) if is_shared else target.copy_(piece)
        for slot in some if is_shared else ():
            part[:, :, slice(*slot.heads)] = total[:, :, slice(*slot.heads)]


def _overlap(slots: Sequence[Slot]) -> bool:
    """Whether a head lies in several slots."""
    ends = sorted(slot.heads for slot in slots if slot.heads[0] < slot.heads[1])
    return any(first[1] > second[0] for first, second in itertools.pairwise(ends))


def _lying(flat: Tensor, part: Tensor, slot: Slot) -> Tensor:
    """The heads of a slot as [T, B, heads, D], a view."""
    _, batch, _, size = part.shape
    steps = batch * slot.stride, slot.stride, size, 1
    return flat.as_strided(part.shape, steps, flat.storage_offset() + slot.offset)
