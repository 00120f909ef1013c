"""Measured loads of experts: the variation by hand, and counts of rows."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.megatron.expert_loads import load_variation


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_the_variation_is_a_mean_over_iterations_and_layers_that_route(seed, iterations, layers, experts):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 50, (iterations, layers, experts), generator=generator).double()
    table[:, 0] *= torch.randint(0, 2, (iterations, 1), generator=generator)
    varies = [
        statistics.pstdev(rows) / statistics.fmean(rows)
        for iteration in table.tolist()
        for rows in iteration
        if any(rows)
    ]
    found = load_variation(table)
    assert found == (pytest.approx(statistics.fmean(varies)) if varies else None)


def test_even_loads_do_not_vary_and_one_expert_with_all_is_the_most():
    assert load_variation(torch.full((2, 3, 8), 7.0)) == 0
    assert load_variation(torch.eye(8)[None, :1] * 40) == pytest.approx(7**0.5)
