"""The halo of a causal convolution: random shards and documents give what one rank computes."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_hexi.plan.halo import Halo, halo
from megatron_hexi.plan.layout import merge_segments
from megatron_hexi.runtime import short_convolution as module
from tests.support.plans import examples

BATCH, CHANNELS, PADDING = 2, 3, 2


@st.composite
def layouts(draw):
    """Draw the segments of each rank, the documents, and the number of taps."""
    owners = draw(st.lists(st.integers(0, 4), min_size=1, max_size=40))
    length, count = len(owners), max(owners) + 1
    shards = [
        merge_segments((at, at + 1) for at, owner in enumerate(owners) if owner == rank)
        for rank in range(count)
    ]
    cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=5))) if length > 1 else []
    return shards, list(itertools.pairwise([0, *cuts, length])), draw(st.integers(1, 5))


def alone(rows: Tensor, weight: Tensor, documents: list[tuple[int, int]]) -> Tensor:
    """Return torch's own convolution of each document."""
    taps = weight.shape[1]
    return torch.cat(
        [
            torch.nn.functional.conv1d(
                rows[start:stop].permute(1, 2, 0), weight[:, None], padding=taps - 1, groups=CHANNELS
            )[..., : stop - start].permute(2, 0, 1)
            for start, stop in documents
        ]
    )


def shared(rows: Tensor, weight: Tensor, shards, halos: list[Halo]) -> list[Tensor]:
    """Return what each rank computes, with the rows that the tables send; padding is not a number."""
    held = [torch.cat([rows[:0], *(rows[start:stop] for start, stop in own)]) for own in shards]
    found = []
    for rank, (own, one) in enumerate(zip(held, halos, strict=True)):
        sent = [held[other][list(table.sends[rank])] for other, table in enumerate(halos)]
        assert [len(part) for part in sent] == list(one.receives)
        tables = module.HaloRows(one, rows.device, mock.sentinel.group)
        padded = torch.cat([own, torch.full((PADDING, BATCH, CHANNELS), torch.nan, dtype=rows.dtype)])
        with mock.patch.object(module._Halo, "apply", lambda *_, sent=sent: torch.cat(sent)):
            output = module.short_convolution(padded, weight, tables)
        assert not output[len(own) :].any()
        found.append(output[: len(own)])
    return found


def largest_difference(layout, change=lambda one: one) -> float:
    """Return how far outputs and gradients are from torch's, in fp64."""
    shards, documents, taps = layout
    torch.manual_seed(0)
    rows = torch.randn(documents[-1][1], BATCH, CHANNELS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CHANNELS, taps, dtype=torch.float64, requires_grad=True)
    halos = [change(halo(shards, rank, documents, taps - 1)) for rank in range(len(shards))]
    true = alone(rows, weight, documents)
    grad = torch.randn_like(true)
    expected = [true, *torch.autograd.grad(true, [rows, weight], grad)]
    output = torch.zeros_like(true)
    for own, part in zip(shards, shared(rows, weight, shards, halos), strict=True):
        places = [at for start, stop in own for at in range(start, stop)]
        output = output.index_copy(0, torch.tensor(places, dtype=torch.int64), part)
    found = [output, *torch.autograd.grad(output, [rows, weight], grad)]
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))


@given(layouts())
@examples(150)
def test_the_convolution_is_that_of_one_rank(layout):
    assert largest_difference(layout) < 1e-12


def _row_before(one: Halo) -> Halo:
    sends = tuple(tuple(max(0, row - 1) for row in rows) for rows in one.sends)
    return Halo(one.reach, sends, one.receives, one.arranged, one.own, one.is_empty)


def _into_the_next_document(one: Halo) -> Halo:
    zeros = max((stop for _, stop in one.arranged), default=1) - 1
    arranged = tuple((0, 1) if span == (zeros, zeros + 1) else span for span in one.arranged)
    return Halo(one.reach, one.sends, one.receives, arranged, one.own, one.is_empty)


@pytest.mark.parametrize("fault", [_row_before, _into_the_next_document])
def test_a_wrong_row_of_a_halo_is_found(fault):
    layout = [((0, 10), (25, 30)), ((10, 25),)], [(0, 12), (12, 30)], 3
    assert largest_difference(layout) < 1e-12
    assert largest_difference(layout, fault) > 0.1
