"""Passes of ministages, with the weights and gradients that each needs."""

from __future__ import annotations

import itertools

import pytest

from megatron_hexi.mesh import ministage_passes


@pytest.mark.parametrize("gives_loss", [False, True])
@pytest.mark.parametrize("ministages", [1, 2, 3])
def test_sweeps_have_what_they_need_and_what_comes_and_goes(ministages, gives_loss):
    found = ministage_passes(ministages, gives_loss)
    numbers = range(ministages)
    assert [one.ministage for one in found if not one.is_backward] == list(numbers)[
        : -1 if gives_loss else None
    ]
    assert [one.ministage for one in found if one.is_backward] == list(reversed(numbers))
    for before, after in itertools.pairwise(found):
        assert set(before.weights) == {before.ministage, after.ministage}
        assert after.ministage in after.weights
        if after.is_backward:
            assert set(after.gradients) == {after.ministage, before.ministage} if before.is_backward else True
    assert found[-1].weights == (0,)
    assert [one.ministage for one in ministage_passes(ministages, gives_loss, forward_only=True)] == list(
        numbers
    )
