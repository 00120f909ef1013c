"""Fused operations as one launch each of the kernels in `triton_kernels`.

Tensors may have any strides whose last is 1. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.runtime import call_rows
from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.fused.terms import Slot, Sum, Term

#: Of a program: few enough for the registers of 128 threads, which hold them in fp32.
_ELEMENTS = 2048


def combine(target: Sum, terms: Sequence[Term], base: Sum | None, sinks: Tensor | None) -> None:
    """As `fused.combine`."""
    value, total = target.value, target.log_sum_exp
    if not value.numel():
        return
    given = [term for term in terms if term.value.numel()]
    sources = [base.value, base.log_sum_exp] if base else []
    sources += [tensor for term in terms for tensor in (term.value, term.log_sum_exp, term.rows.places)]
    batch, heads, rows, width = value.shape
    block = _block(width)
    launch(
        "combine_kernel",
        (-(-rows // block["BLOCK"]), batch * heads),
        (*sources, sinks),
        (value, total),
        *_placed(value),
        *_placed(total),
        *_placed(base.value if base else None),
        *_placed(base.log_sum_exp if base else None),
        sinks,
        tuple(_placed(term.value) for term in given),
        tuple((*_placed(term.log_sum_exp), term.rows.places, *term.rows.span) for term in given),
        rows,
        heads,
        width,
        **block,
    )


def copy_rows(target: Tensor, source: Tensor, rows: Rows) -> None:
    """As `fused.copy_rows`."""
    if not target.numel():
        return
    if rows.index is None:
        source = rows.taken(source)
    batch, heads, count, width = target.shape
    block = _block(width)
    # A sum of one term, of which the index says where each row of the sum lies.
    nothing = None, None
    launch(
        "combine_kernel",
        (-(-count // block["BLOCK"]), batch * heads),
        (target, rows.index),  # as much is read of the source as written
        (target,),
        *_placed(target),
        *nothing,
        *nothing,
        *nothing,
        None,
        (_placed(source),),
        ((*nothing, rows.index, 0, count),),
        count,
        heads,
        width,
        **block,
    )


def pack(flat: Tensor, parts: Sequence[Tensor], slots: Sequence[Slot]) -> None:
    """As `fused.pack`."""
    _move(flat, parts, slots, True)


def unpack(parts: Sequence[Tensor], flat: Tensor, slots: Sequence[Slot]) -> None:
    """As `fused.unpack`."""
    _move(flat, parts, slots, False)


def _move(flat: Tensor, parts: Sequence[Tensor], slots: Sequence[Slot], to_flat: bool) -> None:
    tokens, batch, *_ = parts[0].shape
    table, copies = _table(tuple(slots), tuple(part.shape[2] for part in parts), flat.device)
    if not tokens * batch * len(table):
        return
    block = _block(max(part.shape[3] for part in parts))
    launch(
        "move_kernel",
        (-(-tokens * batch // block["BLOCK"]), len(table)),
        (*parts, table) if to_flat else (flat, table),
        (flat,) if to_flat else tuple(parts),
        flat,
        tuple((*_placed(part), part.shape[3]) for part in parts),
        table,
        tokens * batch,
        batch,
        COPIES=copies,
        TO_FLAT=to_flat,
        **block,
    )


@lru_cache(maxsize=2**8)  # of the latest schedules
def _table(slots: tuple[Slot, ...], heads: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """The table of `move_kernel` and how many copies of a head it has room for."""
    found: dict[tuple[int, int], list[int]] = {
        (part, head): [] for part, count in enumerate(heads) for head in range(count)
    }
    for slot in slots:
        start, stop = slot.heads
        for head in range(start, stop):
            found[slot.part, head] += [slot.offset + (head - start) * slot.size, slot.stride]
    copies = max(map(len, found.values()), default=0) // 2
    lines = [
        [*key, *places, *[-1, 0] * (copies - len(places) // 2)] for key, places in found.items() if places
    ]
    table = torch.tensor(lines, dtype=torch.int64, device="cpu").view(len(lines), 2 + 2 * copies)
    return call_rows.on_device(table, device), copies


def launch(
    kernel: str,
    grid: tuple[int, int],
    reads: Sequence[Tensor | None],
    writes: Sequence[Tensor | None],
    *arguments: Any,
    **constants: Any,
) -> None:
    """Start a kernel.

    Args:
        kernel: its name.
        grid: programs.
        reads: what it reads once, for those who count.
        writes: what it writes once, likewise.
        arguments: of the kernel.
        constants: with which it is compiled.
    """
    module = import_module("megatron_hexi.runtime.fused.triton_kernels")
    getattr(module, kernel)[grid](*arguments, **constants)


def _placed(tensor: Tensor | None) -> tuple[Tensor | None, tuple[int, ...] | None]:
    """A tensor, and its steps of the first three dimensions."""
    return (None, None) if tensor is None else (tensor, tensor.stride()[:3])


def _block(width: int) -> dict[str, int]:
    """How many rows and columns a program takes, powers of 2."""
    columns = 1 << (width - 1).bit_length()
    return {"BLOCK": max(1, _ELEMENTS // columns), "WIDTH": columns}
