"""Fused operations as Triton kernels: imported only where they run, or are tested (TRITON_INTERPRET=1).

A program computes some rows of a head. Sums are in fp32. Triton reads annotations, so only its own are used
here.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["places", "rows"])
def combine_kernel(
    target,
    target_steps,
    total,
    total_steps,
    base,
    base_steps,
    base_total,
    base_total_steps,
    sinks,
    terms,
    places,
    rows,
    heads,
    width,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute `plain.combine`; each tensor is a pointer with its strides (steps) of batch, head and row.

    An entry of `terms` is (value, steps). An entry of `places` is (log-sum-exp, steps, map, first row, last
    row + 1); the map has the term's row for each row of the sum from the first, -1 for none. The rows change
    with each sequence of documents, so Triton must not specialize the kernel for divisors of these numbers.
    """
    place = tl.program_id(1)
    batch, head = (place // heads).to(tl.int64), (place % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    is_row, is_column = row < rows, column < width
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    if total is not None:
        if sinks is not None:
            most = tl.maximum(most, tl.load(sinks + head).to(tl.float32))
        if base_total is not None:
            at = batch * base_total_steps[0] + head * base_total_steps[1] + row * base_total_steps[2]
            most = tl.maximum(most, tl.load(base_total + at, mask=is_row, other=float("-inf")))
        for i in tl.static_range(len(terms)):
            part_total, part_steps, index, first, last = places[i]
            term_row, has = _own_rows(index, first, last, row, is_row)
            at = batch * part_steps[0] + head * part_steps[1] + term_row * part_steps[2]
            most = tl.maximum(most, tl.load(part_total + at, mask=has, other=float("-inf")))
        most = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    if total is not None and sinks is not None:
        weights += tl.exp(tl.load(sinks + head).to(tl.float32) - most)
    if base is not None:
        at = batch * base_steps[0] + head * base_steps[1] + row * base_steps[2]
        mask = is_row[:, None] & is_column[None, :]
        value = tl.load(base + at[:, None] + column[None, :], mask=mask, other=0.0)
        if total is not None:
            at = batch * base_total_steps[0] + head * base_total_steps[1] + row * base_total_steps[2]
            weight = tl.exp(tl.load(base_total + at, mask=is_row, other=float("-inf")) - most)
            weights += weight
            value = value * weight[:, None]
        sums += value
    for i in tl.static_range(len(terms)):
        part, steps = terms[i]
        part_total, part_steps, index, first, last = places[i]
        term_row, has = _own_rows(index, first, last, row, is_row)
        at = batch * steps[0] + head * steps[1] + term_row * steps[2]
        mask = has[:, None] & is_column[None, :]
        value = tl.load(part + at[:, None] + column[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
        if total is not None:
            at = batch * part_steps[0] + head * part_steps[1] + term_row * part_steps[2]
            weight = tl.exp(tl.load(part_total + at, mask=has, other=float("-inf")) - most)
            weights += weight
            value = value * weight[:, None]
        sums += value
    if total is not None:
        at = batch * total_steps[0] + head * total_steps[1] + row * total_steps[2]
        tl.store(total + at, most + tl.log(weights), mask=is_row)
        sums = sums / tl.where(weights == 0.0, 1.0, weights)[:, None]
    at = batch * target_steps[0] + head * target_steps[1] + row * target_steps[2]
    tl.store(
        target + at[:, None] + column[None, :],
        sums.to(target.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
def _own_rows(index, first, last, row, is_row):
    """Return the row of a term for each row of the sum, and whether the term has this row."""
    has = is_row & (row >= first) & (row < last)
    term_row = row - first
    if index is not None:
        term_row = tl.load(index + term_row, mask=has, other=-1).to(tl.int64)
        has = term_row >= 0
    return term_row, has


@triton.jit
def move_kernel(
    flat,
    parts,
    table,
    rows,
    batch,
    COPIES: tl.constexpr,
    TO_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute `plain.make_pack` and `plain.make_unpack`.

    An entry of `parts` is (tensor, steps of tokens, batch and head, size of a head). A line of `table`
    describes a head: number of the part, number of the head, then offset and stride of each copy of the head
    in the flat message, with offset -1 for no copy.
    """
    line = table + tl.program_id(1) * (2 + 2 * COPIES)
    part_number, head = tl.load(line), tl.load(line + 1)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    for i in tl.static_range(len(parts)):
        if part_number == i:
            part, steps, width = parts[i]
            at = (row // batch) * steps[0] + (row % batch) * steps[1] + head * steps[2]
            places = part + at[:, None] + column[None, :]
            mask = (row < rows)[:, None] & (column < width)[None, :]
            if TO_FLAT:
                value = tl.load(places, mask=mask)
                for copy in tl.static_range(COPIES):
                    offset, stride = tl.load(line + 2 + 2 * copy), tl.load(line + 3 + 2 * copy)
                    if offset >= 0:
                        there = flat + offset + (row * stride)[:, None] + column[None, :]
                        tl.store(there, value, mask=mask)
            else:
                sums = tl.zeros([BLOCK, WIDTH], tl.float32)
                for copy in tl.static_range(COPIES):
                    offset, stride = tl.load(line + 2 + 2 * copy), tl.load(line + 3 + 2 * copy)
                    if offset >= 0:
                        there = flat + offset + (row * stride)[:, None] + column[None, :]
                        sums += tl.load(there, mask=mask, other=0.0).to(tl.float32)
                tl.store(places, sums.to(part.dtype.element_ty), mask=mask)
