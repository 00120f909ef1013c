"""A delta net layer under any plan is Megatron's on one rank: output and every gradient, to 1e-10 in fp64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.forked import Forks, Outcome


def _compared(forks: Forks, folder: Path, count: int, *faults: str) -> Outcome:
    words = [str(count), *faults]
    return forks.launch(folder, ranks=1, args=words, entry="tests.megatron.delta_net_ranks", timeout=600.0)


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_random_layers_under_random_plans(count: int, forks: Forks, tmp_path: Path):
    outcome = _compared(forks, tmp_path, count)
    assert outcome.succeeded, outcome.why()


@pytest.mark.parametrize("fault", ["decay-of-the-first-value-heads", "shared-groups-used-once"])
def test_a_fault_is_found(fault: str, forks: Forks, tmp_path: Path):
    outcome = _compared(forks, tmp_path, 30, fault)
    assert not outcome.succeeded
    assert "differs by" in outcome.why()
