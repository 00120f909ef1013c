"""Each weight's gradient where stages differ is that of one rank, whoever of a unit holds the weight."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.checkpoint_contents import tensors_of
from tests.megatron.conftest import References
from tests.megatron.forked import ENTRY, Forks
from tests.megatron.option_cases import SINKS
from tests.megatron.test_stages_training import CASES, MODEL, QK_NORM, SEQUENCE, UNTIED, words

#: Kinds of weights that the ranks of a unit hold apart, or together with a part of the gradient each.
KINDS_OF_WEIGHTS = (*SINKS, *QK_NORM, *UNTIED, "--add-qkv-bias")


@pytest.fixture(scope="module")
def first_moments(forks: Forks, references: References, tmp_path_factory: pytest.TempPathFactory):
    """After one step of `TENSOR_FIRST` or of one rank: each weight's first moment, by its name."""

    def train(has_plan: bool, *job: str) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("moments")
        model = (*MODEL, *KINDS_OF_WEIGHTS)
        saving = ("--save", str(folder / "saved"), "--save-interval", "1", *job)
        forks.train(
            folder,
            ranks=3 if has_plan else 1,
            args=words(model, 1, references(model, 1)[0], saving),
            plan=CASES["options"].plan(folder) if has_plan else None,
            entry="tests.megatron.planted" if "--planted" in job else ENTRY,
        )
        tensors = tensors_of(folder / "saved" / "iter_0000001")
        prefix = "optimizer.state.exp_avg."
        return {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }

    return train


@pytest.fixture(scope="module")
def moments_of_one_rank(first_moments):
    return first_moments(False)


def differences(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far each weight's moment is off, as a part of its largest."""
    assert found.keys() == true.keys()
    return {
        name: float((found[name] - moment).abs().max() / moment.abs().max()) for name, moment in true.items()
    }


@pytest.mark.parametrize(
    "job", [SEQUENCE, pytest.param((), marks=pytest.mark.slow)], ids=["sequence", "plain"]
)
def test_each_weights_gradient_is_that_of_one_rank(job, first_moments, moments_of_one_rank):
    """Losses and norms hardly show a gradient of few elements that is off by a factor."""
    found = differences(first_moments(True, *job), moments_of_one_rank)
    assert {"softmax_offset", "q_layernorm", "linear_qkv"} <= {
        part for name in found for part in name.split(".")
    }
    assert max(found.values()) < 2e-4, found


def test_the_comparison_of_gradients_finds_sinks_that_are_divided(first_moments, moments_of_one_rank):
    found = differences(first_moments(True, *SEQUENCE, "--planted", "parts-as-copies"), moments_of_one_rank)
    assert {name for name, off in found.items() if off > 0.4} == {
        name for name in found if "softmax_offset" in name
    }
