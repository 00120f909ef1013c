"""A vision-language model in a loop of one's own under uneven plans, beside Megatron-Core on one rank.

The ranks also compare the rotation of their rows with transformers' Qwen2.5-VL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron.test_own_loop import EXAMPLE, Results, train_all

SCRIPT = Path(__file__).parent / "vision_loop_ranks.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("vision-loop")
    text = EXAMPLE.read_text()
    for rank, heads, patches in ((0, "[0, 4]", 1), (1, "[4, 6]", 0), (2, "[0, 6]", 2)):
        member = f"{{ranks: [{rank}], tokens: {(50, 21, 30)[rank]}, heads: {heads}}}"
        assert member in text
        text = text.replace(member, f"{member[:-1]}, patches: {patches}}}")
    (folder / "dealt.yaml").write_text(text)
    return train_all(SCRIPT, folder, folder / "dealt.yaml")


@pytest.mark.parametrize("job", ["replicas", "stages"])
def test_losses_and_weights_are_those_of_one_rank(results: Results, job: str):
    losses, weights = results[job]
    true_losses, true_weights = results["alone"]
    assert losses == pytest.approx(true_losses, rel=1e-6)
    assert weights.keys() == true_weights.keys()
    assert "visual.weight" in weights
    for name, weight in weights.items():
        torch.testing.assert_close(weight, true_weights[name], rtol=0, atol=1e-6)


def test_halved_gradients_of_features_show_in_the_encoder(results: Results):
    found, true = (results[job][1]["visual.weight"] for job in ("gradients halved", "alone"))
    assert (found - true).abs().max() > 1e-5  # equal jobs differ by a tenth of it at most


@pytest.mark.parametrize("fault", ["other sections", "features one row off"])
def test_a_planted_fault_shows_in_the_first_loss(results: Results, fault: str):
    true = results["alone"][0][0]
    assert abs(results[fault][0][0] - true) > 1e-5  # equal jobs differ by half of it at most
