"""Fused operations in torch, term by term: the reference, and the way on CPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.fused.terms import Slot, Sum, Term


def combine(target: Sum, terms: Sequence[Term], base: Sum | None, sinks: Tensor | None) -> None:
    """As `fused.combine`."""
    value = target.value
    wide = torch.promote_types(value.dtype, torch.float32)
    everything = Rows((0, value.shape[2]))
    if base is not None:
        terms = [Term(everything, base.value, base.log_sum_exp), *terms]
    weights: Sequence[Tensor | None] = [None] * len(terms)
    if target.log_sum_exp is not None:
        weights = _weights(target.log_sum_exp, terms, sinks)
    pairs = list(zip(terms, weights, strict=True))
    if not terms or not terms[0].rows.covers(value.shape[2]):
        sums = torch.zeros_like(value, dtype=wide)
    else:
        term, weight = pairs.pop(0)
        if weight is not None:
            sums = term.value * weight
        elif value.dtype == wide or not pairs:
            sums = value.copy_(term.value)
        else:
            sums = term.value.to(wide)
    for term, weight in pairs:
        if weight is None:
            term.rows.add(sums, term.value)
        elif term.rows.index is None:
            term.rows.taken(sums).addcmul_(term.value, weight)
        else:
            term.rows.add(sums, term.value * weight)
    if sums is not value:
        value.copy_(sums)


def _weights(total: Tensor, terms: Sequence[Term], sinks: Tensor | None) -> list[Tensor]:
    """What each term is multiplied with, [B, h, Q, 1]; the log-sum-exp of all goes to `total`."""
    found = torch.full_like(total, -torch.inf)
    if sinks is not None:
        found[:] = sinks[:, None]
    parts = []
    for term in terms:
        assert term.log_sum_exp is not None
        parts.append((term.rows, term.log_sum_exp))
        # torch.logaddexp, so that nothing overflows
        term.rows.put(found, torch.logaddexp(term.rows.taken(found), term.log_sum_exp))
    weights = [torch.exp(part - rows.taken(found))[..., None] for rows, part in parts]
    total.copy_(found)
    return weights


def copy_rows(target: Tensor, source: Tensor, rows: Rows) -> None:
    """As `fused.copy_rows`."""
    target.copy_(rows.taken(source))


def pack(flat: Tensor, parts: Sequence[Tensor], slots: Sequence[Slot]) -> None:
    """As `fused.pack`."""
    for slot in slots:
        part = parts[slot.part][:, :, slice(*slot.heads)]
        _lying(flat, part, slot).copy_(part)


def unpack(parts: Sequence[Tensor], flat: Tensor, slots: Sequence[Slot]) -> None:
    """As `fused.unpack`."""
    for number, part in enumerate(parts):
        mine = [slot for slot in slots if slot.part == number]
        ends = [
            slot.heads for slot in sorted(mine, key=lambda slot: slot.heads) if slot.heads[0] < slot.heads[1]
        ]
        shared = any(first[1] > second[0] for first, second in itertools.pairwise(ends))
        wide = torch.promote_types(part.dtype, torch.float32)
        total = torch.zeros_like(part, dtype=wide) if shared else part
        for slot in mine:
            target = total[:, :, slice(*slot.heads)]
            piece = _lying(flat, target, slot)
            target.add_(piece) if shared else target.copy_(piece)
        for slot in mine if shared else ():
            part[:, :, slice(*slot.heads)] = total[:, :, slice(*slot.heads)]


def _lying(flat: Tensor, part: Tensor, slot: Slot) -> Tensor:
    """The heads of a slot as [T, B, heads, D], a view."""
    _, batch, _, size = part.shape
    steps = batch * slot.stride, slot.stride, size, 1
    return flat.as_strided(part.shape, steps, flat.storage_offset() + slot.offset)
