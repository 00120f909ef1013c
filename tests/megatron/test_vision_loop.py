"""A vision-language model in a loop of one's own under uneven plans, beside Megatron-Core on one rank.

The ranks also compare the rotation of their rows with transformers' Qwen2.5-VL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron.test_own_loop import Results, train_all

SCRIPT = Path(__file__).parent / "vision_loop_ranks.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return train_all(SCRIPT, tmp_path_factory.mktemp("vision-loop"))


@pytest.mark.parametrize("job", ["replicas", "stages"])
def test_losses_and_weights_are_those_of_one_rank(results: Results, job: str):
    losses, weights = results[job]
    true_losses, true_weights = results["alone"]
    assert losses == pytest.approx(true_losses, rel=1e-6)
    assert weights.keys() == true_weights.keys()
    assert "visual.weight" in weights
    for name, weight in weights.items():
        torch.testing.assert_close(weight, true_weights[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("fault", ["other sections", "features one row off"])
def test_a_planted_fault_shows_in_the_first_loss(results: Results, fault: str):
    true = results["alone"][0][0]
    assert abs(results[fault][0][0] - true) > 1e-5  # equal jobs differ by half of it at most
