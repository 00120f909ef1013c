"""Fine-tuning in Megatron Bridge's own loop under uneven plans, beside Bridge alone on one rank."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron.bridge_data import whole_sequences
from megatron_hexi.megatron.bridge_job import refuse_adapters
from tests.megatron import bridge_emulated, test_bridge_models
from tests.megatron.launch import launch
from tests.megatron.test_bridge_training import HEADER, PLANS, Results, read_results

pytestmark = pytest.mark.skipif(
    not bridge_emulated.is_available(), reason="Megatron Bridge is not unpacked; see scripts/bootstrap.sh"
)

SCRIPT = Path(__file__).parent / "bridge_tuning.py"
#: A plan with units of two tensor-parallel ranks, whose heads count those of one of them.
UNITS = """\
- stages:
  - domains:
    - groups:
      - segments: [[0, 101]]
        members:
        - {ranks: [0, 1], tokens: 71, heads: [0, 1]}
        - {ranks: [2, 3], tokens: 30, heads: [1, 2]}
"""
#: A plan with a stage between the first and the last.
THREE_STAGES = """\
- stages:
  - {layers: [0, 1], domains: [{ranks: [0]}]}
  - layers: [1, 3]
    domains:
    - groups:
      - segments: [[0, 101]]
        members:
        - {ranks: [1], tokens: 71, heads: [0, 3]}
        - {ranks: [2], tokens: 30, heads: [3, 4]}
  - {layers: [3, 4], domains: [{ranks: [3]}]}
"""
Steps = Sequence[Sequence[str | None]]


@dataclass
class LoRA:
    """Bridge's adapters, without Bridge."""

    target_modules: list[str] = field(default_factory=lambda: ["linear_qkv", "linear_fc1"])
    dropout: float = 0.0
    a2a_experimental: bool = False


class VLMLoRA(LoRA):
    """Adapters of another kind."""


def run(folder: Path, ranks: int, steps: Steps) -> None:
    """Run steps, which `tuning_ranks.Step` describes."""
    args = (SCRIPT, folder, json.dumps(steps))
    ended = launch(folder, ranks=ranks, args=args, entry="tests.megatron.bridge_run", timeout=240)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]


def prepared(folder: Path) -> Path:
    for fault in ("boundary", "gradients"):
        (folder / fault).mkdir()
    for name, replicas in (PLANS | {"units": UNITS, "three-stages": THREE_STAGES}).items():
        (folder / f"{name}.yaml").write_text(HEADER + replicas)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of packed documents, and of adapters saved and loaded."""
    folder = prepared(tmp_path_factory.mktemp("tuning"))
    run(folder, 1, [("packed", "packed"), ("lora", "lora", None, "saved-alone")])
    run(
        folder,
        4,
        [
            ("packed-one-stage", "packed", "one-stage"),
            ("lora-stages", "lora", "stages", "saved-by-plan"),
            ("lora-there", "lora", "stages", None, "saved-alone"),
            ("lora", "lora", "one-stage", None, None, "boundary"),
            ("lora", "lora", "one-stage", None, None, "gradients"),
        ],
    )
    run(folder, 1, [("lora-back", "lora", None, None, "saved-by-plan")])
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return read_results(folder)


def assert_equal(results: Results, job: str, reference: str, since: int = 0) -> None:
    losses, weights = results[job]
    true_losses, true_weights = results[reference]
    assert losses == pytest.approx(true_losses[since : since + len(losses)], rel=1e-5)
    assert weights.keys() == true_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, true_weights[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("job", ["packed-one-stage", "lora-stages"])
def test_losses_and_weights_are_those_of_one_rank(results: Results, job: str):
    assert len(set(results[job][0])) == 10 + 1  # one of validation
    assert not job.startswith("lora") or sum(".adapter." in name for name in results[job][1]) == 4 * 4 * 2
    assert_equal(results, job, job.partition("-")[0])


@pytest.mark.parametrize("job", ["lora-there", "lora-back"])
def test_saved_adapters_go_on_under_a_plan_and_without(results: Results, job: str):
    assert len(results[job][0]) == 5
    assert_equal(results, job, "lora", since=5)


@pytest.mark.parametrize(("fault", "iteration"), [("boundary", 0), ("gradients", 1)])
def test_a_planted_fault_shows_in_the_losses(folder: Path, results: Results, fault: str, iteration: int):
    found, true = read_results(folder / fault)["lora"][0], results["lora"][0]
    assert found[:iteration] == pytest.approx(true[:iteration], rel=1e-5)
    assert abs(found[iteration] - true[iteration]) > 1e-5 * true[iteration]


@pytest.mark.parametrize(
    ("peft", "experts", "words"),
    [
        (LoRA(dropout=0.1), None, "peft.dropout 0.1: its random numbers would depend on the plan; give 0"),
        (LoRA(a2a_experimental=True), None, "peft.a2a_experimental True: it exchanges equal parts of a"),
        (VLMLoRA(), None, "peft VLMLoRA: a plan trains LoRA, DoRA, CanonicalLoRA; give one of them"),
        (LoRA(), 8, "peft.target_modules linear_fc1: experts hold this layer, whose adapters do not train"),
    ],
)
def test_other_adapters_are_refused_by_name(peft: LoRA, experts: int | None, words: str):
    with pytest.raises(HexiError, match=re.escape(words)):
        refuse_adapters(peft, Namespace(num_moe_experts=experts))


def test_short_sequences_are_padded_behind_their_last_document():
    ends = torch.tensor([[0, 3, 6, 6, 6]])
    sample = {"tokens": torch.ones(1, 6), "loss_mask": torch.ones(1, 6), "metadata": ["x"]}
    alone = whole_sequences(sample | {"cu_seqlens_q": ends, "cu_seqlens_kv": ends.clone()}, 8)
    assert alone["cu_seqlens_q"].tolist() == alone["cu_seqlens_kv"].tolist() == [[0, 3, 8]]
    packed = sample | {"cu_seqlens_q": torch.tensor([[0, 2, 5, 5, 5]]), "cu_seqlens_q_padded": ends}
    whole = whole_sequences(packed, 8)
    assert whole["tokens"].shape == (1, 8)
    assert whole["loss_mask"].sum() == 6
    assert whole["cu_seqlens_q_padded"].tolist() == [[0, 3, 8]]
    assert whole["cu_seqlens_q"].tolist() == [[0, 2, 5]]
    assert ends.tolist() == [[0, 3, 6, 6, 6]]
    assert whole_sequences(sample, 6).keys() == sample.keys()


@pytest.mark.slow
def test_other_jobs_of_fine_tuning_are_those_of_one_rank(tmp_path: Path):
    jobs = ("sft", "packed", "lora", "dora", "canonical")
    pairs = [(job, plan) for job in jobs for plan in (*PLANS, "three-stages")]
    prepared(tmp_path)
    run(tmp_path, 1, [(job, job) for job in jobs])
    run(tmp_path, 4, [(f"{job}-{plan}", job, plan) for job, plan in pairs])
    results = read_results(tmp_path)
    for job, plan in pairs:
        assert_equal(results, f"{job}-{plan}", job)


@pytest.mark.slow
def test_adapters_of_tensor_parallel_units_go_on_as_one_ranks(tmp_path: Path):
    """Ranks of a unit make their parts of the adapters themselves: one rank goes on from what they saved."""
    prepared(tmp_path)
    run(tmp_path, 1, [])
    run(tmp_path, 4, [("parts", "lora", "units", "saved")])
    run(tmp_path, 1, [("whole", "lora", None, None, "saved")])
    (losses, first), (_, second), (true_losses, weights) = (
        torch.load(tmp_path / f"{name}.pt") for name in ("parts-0", "parts-1", "whole-0")
    )
    assert losses[5:10] == pytest.approx(true_losses, rel=1e-5)
    for name in (name for name in weights if ".adapter." in name):
        parts, true = (first[name], second[name]), weights[name]
        axis = next(axis for axis in range(2) if true.shape[axis] == 2 * parts[0].shape[axis])
        torch.testing.assert_close(torch.cat(parts, axis), true, rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
def test_adapters_beside_experts_are_those_of_one_rank(tmp_path: Path):
    workload = test_bridge_models.HEADER.format(test_bridge_models.WORKLOADS["experts"])
    for plan in ("groups", "stages"):
        (tmp_path / f"{plan}.yaml").write_text(workload + test_bridge_models.PLANS[plan])
    run(tmp_path, 1, [("experts", "experts")])
    run(tmp_path, 4, [(f"experts-{plan}", "experts", plan) for plan in ("groups", "stages")])
    for plan in ("groups", "stages"):
        assert_equal(read_results(tmp_path), f"experts-{plan}", "experts")
