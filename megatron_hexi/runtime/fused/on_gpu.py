"""Fused operations on GPUs: one launch of a kernel of `triton_kernels` each.

Tensors may have any strides whose last is 1. Nothing waits for the device. A launch only collects pointers
and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.runtime import call_rows
from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.fused.plain import Slot

#: Number of elements of a Triton program: few enough for fp32 values in the registers of 128 threads.
_ELEMENTS = 2048
#: Placeholder for an optional tensor that is not given, and for its strides.
_NONE = None, None


def combine(
    rows: Sequence[Rows],
    target: Tensor,
    total: Tensor | None,
    base: Tensor | None,
    base_total: Tensor | None,
    sinks: Tensor | None,
    *parts: Tensor,
) -> None:
    """Write the sum of terms to `target` in one kernel; arguments as of `plain.combine`."""
    if not target.numel():
        return
    values = parts[: len(rows)]
    totals: Sequence[Tensor | None] = parts[len(rows) :] or [None] * len(rows)
    terms = [term for term in zip(rows, values, totals, strict=True) if term[1].numel()]
    places = [term_rows.places for term_rows, _, _ in terms]
    batch, heads, count, width = target.shape
    block = _block(width)
    launch(
        "combine_kernel",
        (-(-count // block["BLOCK"]), batch * heads),
        (base, base_total, *parts, *places, sinks),
        (target, total),
        target,
        target.stride()[:3],
        *(_NONE if total is None else (total, total.stride())),
        *(_NONE if base is None else (base, base.stride()[:3])),
        *(_NONE if base_total is None else (base_total, base_total.stride())),
        sinks,
        tuple([(value, value.stride()[:3]) for _, value, _ in terms]),
        tuple(
            [
                (*(_NONE if lse is None else (lse, lse.stride())), index, *term_rows.span)
                for (term_rows, _, lse), index in zip(terms, places, strict=True)
            ]
        ),
        count,
        heads,
        width,
        **block,
    )


def copy_rows(rows: Rows, target: Tensor, source: Tensor) -> None:
    """Copy rows in one kernel; arguments as of `plain.copy_rows`."""
    if not target.numel():
        return
    if rows.index is None:
        source = rows.taken(source)
    batch, heads, count, width = target.shape
    block = _block(width)
    # A sum of one term, of which the index says where each row of the sum lies.
    launch(
        "combine_kernel",
        (-(-count // block["BLOCK"]), batch * heads),
        (target, rows.index),  # as much is read of the source as written
        (target,),
        target,
        target.stride()[:3],
        *_NONE,
        *_NONE,
        *_NONE,
        None,
        ((source, source.stride()[:3]),),
        ((*_NONE, rows.index, 0, count),),
        count,
        heads,
        width,
        **block,
    )


def make_pack(slots: Sequence[Slot], heads: Sequence[int], device: torch.device) -> Callable[..., None]:
    """Return a function that writes heads of tensors to a flat message in one kernel (`plain.make_pack`)."""
    return partial(_move, *_table(slots, heads, device), True)


def make_unpack(slots: Sequence[Slot], heads: Sequence[int], device: torch.device) -> Callable[..., None]:
    """Return a function that reads heads of tensors from a flat message in one kernel.

    Copies of a head are summed in fp32; see `plain.make_unpack`.
    """
    return partial(_move, *_table(slots, heads, device), False)


def _move(table: Tensor, copies: int, to_flat: bool, flat: Tensor, *parts: Tensor) -> None:
    tokens, batch, *_ = parts[0].shape
    if not tokens * batch * len(table):
        return
    block = _block(max([part.shape[3] for part in parts]))
    launch(
        "move_kernel",
        (-(-tokens * batch // block["BLOCK"]), len(table)),
        (*parts, table) if to_flat else (flat, table),
        (flat,) if to_flat else parts,
        flat,
        tuple([(part, part.stride()[:3], part.shape[3]) for part in parts]),
        table,
        tokens * batch,
        batch,
        COPIES=copies,
        TO_FLAT=to_flat,
        **block,
    )


def _table(slots: Sequence[Slot], heads: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """Return the table of `move_kernel`, and the number of copies of a head that it has room for."""
    places_by_head: dict[tuple[int, int], list[int]] = {
        (part, head): [] for part, count in enumerate(heads) for head in range(count)
    }
    for slot in slots:
        start, stop = slot.heads
        for head in range(start, stop):
            places_by_head[slot.part, head] += [slot.offset + (head - start) * slot.size, slot.stride]
    copies = max(map(len, places_by_head.values()), default=0) // 2
    lines = [
        [*key, *places, *[-1, 0] * (copies - len(places) // 2)]
        for key, places in places_by_head.items()
        if places
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
    """Launch a kernel of `triton_kernels`.

    Args:
        grid: numbers of programs along both axes.
        reads: tensors that the kernel reads once, for tests and benchmarks that count bytes.
        writes: tensors that the kernel writes once, for tests and benchmarks that count bytes.
    """
    getattr(_kernels(), kernel)[grid](*arguments, **constants)


@cache
def _kernels() -> ModuleType:
    """Return the kernels' module, imported on first use: Triton is not installed everywhere."""
    return import_module("megatron_hexi.runtime.fused.triton_kernels")


@cache  # head sizes are few
def _block(width: int) -> dict[str, int]:
    """Return the numbers of rows and columns of a program, powers of 2, for heads of a width."""
    columns = 1 << (width - 1).bit_length()
    return {"BLOCK": max(1, _ELEMENTS // columns), "WIDTH": columns}
