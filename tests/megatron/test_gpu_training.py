"""Ranks on one GPU train as one rank on the CPU does: with CUDA's streams, Triton's kernels and real NCCL."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_hexi.cluster import read_cluster
from tests.megatron import test_ministages as ministages
from tests.megatron import test_stages_training as stages
from tests.megatron.conftest import References, job
from tests.megatron.launch import TrainingLog
from tests.megatron.one_card import OneCard, OneCardWithTe
from tests.megatron.option_cases import CASES as OPTIONS
from tests.megatron.option_cases import balanced
from tests.megatron.test_option_training import check_case, steps
from tests.megatron.test_replanning import OTHERS, swapping
from tests.megatron.test_stages_training import SMALL_BUCKETS, check_training
from tests.megatron.test_state_layers import LAYOUTS, plan_of
from tests.megatron.test_uneven_training import THREE_AND_ONE, largest_difference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: Uneven stages, tensor-parallel sizes and samples; ministages; what is offloaded to the host. No sequence
#: parallelism: Megatron's own norms know none on a GPU, those of apex and Transformer Engine do.
UNEVEN = {
    "tensor-parallel-sizes": replace(stages.CASES["tensor-parallel-sizes"], job=SMALL_BUCKETS),
    "samples": stages.CASES["samples"],
    "tensor-parallel-domain": stages.CASES["windows-sinks"],
    "ministages": ministages.CASES["one-stage"],
    "offloaded": ministages.OFFLOADED["two-stages"],
    "micro-batches": ministages.DEALT["before-one"],
}
UNEVEN_TE = {
    **UNEVEN,
    "tensor-parallel-sizes": stages.CASES["tensor-parallel-sizes"],
    "options": stages.CASES["options"],
}
MASKS = ("documents", "windows-sinks")
EXPERTS = balanced("aux_loss")
#: What only Transformer Engine computes.
TE_OPTIONS = {
    "random-numbers": ("--te-rng-tracker",),
    "grouped-experts": (*EXPERTS, "--moe-grouped-gemm"),
    "no-fused-accumulation": ("--no-gradient-accumulation-fusion",),
}
#: Layers with a state, by sizes that the libraries' kernels take; heads that no plan here cuts evenly.
_DELTA = (
    *("--linear-num-key-heads", "2", "--linear-num-value-heads", "10"),
    *("--linear-key-head-dim", "32", "--linear-value-head-dim", "32"),
)
STATES = {
    "mamba": (
        *("--hybrid-layer-pattern", "M*M-", "--mamba-num-heads", "10", "--mamba-head-dim", "32"),
        *("--mamba-num-groups", "2", "--mamba-state-dim", "32"),
    ),
    "delta": ("--hybrid-layer-pattern", "G*G-", *_DELTA),
    "delta-gpt": (
        *("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "4"),
        *("--num-layers", "4", *_DELTA, "--disable-bias-linear"),
    ),
}
#: The library whose kernels each needs.
_LIBRARIES = {"mamba": "causal_conv1d", "delta": "fla", "delta-gpt": "fla"}


def _has_te() -> bool:
    try:
        return bool(version("transformer-engine-torch"))
    except PackageNotFoundError:
        return False


with_te = pytest.mark.skipif(not _has_te(), reason="needs Transformer Engine with its extension")


@pytest.mark.parametrize("trainer", [OneCard, pytest.param(OneCardWithTe, marks=with_te)])
def test_groups_train_as_one_rank(trainer: type[OneCard], references: References, tmp_path: Path):
    weights, reference = references((), 4)
    words: list[str | Path] = [*job(()), *steps(4), "--load", weights, "--finetune"]
    log = trainer().train(tmp_path, ranks=4, args=words, plan=THREE_AND_ONE)
    assert largest_difference(log, reference) < 1e-5


@pytest.mark.parametrize("trainer", [OneCard, pytest.param(OneCardWithTe, marks=with_te)])
def test_groups_in_bf16_are_as_near_as_one_rank(
    trainer: type[OneCard], references: References, tmp_path: Path
):
    """By the kernels for half precision; one rank by Megatron's or Transformer Engine's own attention."""
    weights, exact = references((), 6)
    words: list[str | Path] = [*job(()), *steps(6), "--load", weights, "--finetune", "--bf16"]
    plain = trainer().train(tmp_path / "plain", ranks=1, args=words)
    ours = trainer().train(tmp_path / "ours", ranks=4, args=words, plan=THREE_AND_ONE)
    assert _error(ours, exact) < 2 * _error(plain, exact)


@with_te
@pytest.mark.parametrize("name", TE_OPTIONS)
def test_what_transformer_engine_computes_is_that_of_one_rank(name: str, tmp_path: Path):
    te, words = OneCardWithTe(), [*job(TE_OPTIONS[name]), *steps(4)]
    save = ("--save", tmp_path / "weights", "--save-interval", "1", "--no-save-optim")
    te.train(tmp_path / "first", ranks=1, args=[*job(TE_OPTIONS[name]), *steps(1), *save])
    words += ["--load", str(tmp_path / "weights"), "--finetune"]
    reference = te.train(tmp_path / "one", ranks=1, args=words)
    log = te.train(tmp_path / "four", ranks=4, args=words, plan=THREE_AND_ONE)
    assert largest_difference(log, reference) < 1e-5


@with_te
@pytest.mark.parametrize("layout", ["uneven-heads", "no-heads"])
@pytest.mark.parametrize("name", STATES)
def test_layers_with_a_state_are_those_of_one_rank(name: str, layout: str, tmp_path: Path):
    """By the libraries' kernels on both sides: they multiply in TF32, each head by itself."""
    if find_spec(_LIBRARIES[name]) is None:
        pytest.skip(f"needs {_LIBRARIES[name]}")
    te, words = OneCardWithTe(), [*job(STATES[name]), *steps(4)]
    save = ("--save", tmp_path / "weights", "--save-interval", "1", "--no-save-optim")
    te.train(tmp_path / "first", ranks=1, args=[*job(STATES[name]), *steps(1), *save])
    words += ["--load", str(tmp_path / "weights"), "--finetune"]
    reference = te.train(tmp_path / "one", ranks=1, args=words)
    plan = plan_of(LAYOUTS[layout])
    log = te.train(tmp_path / "ours", ranks=plan.units, args=words, plan=plan)
    assert largest_difference(log, reference) < 1e-5


def _error(log: TrainingLog, exact: TrainingLog) -> float:
    return sum(abs(a / b - 1) for a, b in zip(log.losses, exact.losses, strict=True))


@pytest.mark.parametrize("case", UNEVEN.values(), ids=UNEVEN)
def test_uneven_stages_train_as_one_rank(case: stages.Case, references: References, tmp_path: Path):
    check_training(case, 4, OneCard(), references, tmp_path)


@with_te
@pytest.mark.parametrize("case", UNEVEN_TE.values(), ids=UNEVEN_TE)
def test_uneven_stages_with_transformer_engine(case: stages.Case, references: References, tmp_path: Path):
    check_training(case, 4, OneCardWithTe(), references, tmp_path)


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_without_a_plan(name: str, references: References, documents, tmp_path: Path):
    check_case(OPTIONS[name], "groups", OneCard(), references, documents, tmp_path)


@with_te
@pytest.mark.parametrize("name", MASKS)
def test_masks_with_transformer_engine(
    name: str, references: References, documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(OneCardWithTe, "words", (*OneCardWithTe.words, "--no-rope-fusion"))
    check_case(OPTIONS[name], "groups", OneCardWithTe(), references, documents, tmp_path)


def test_plans_are_swapped(tmp_path: Path):
    still, swapped, record = swapping(OneCard(), tmp_path, THREE_AND_ONE, OTHERS, 14)
    assert swapped.losses == pytest.approx(still.losses, rel=1e-5)
    assert len(record.legs) >= 2


def test_links_are_measured_over_nccl(tmp_path: Path):
    """Two nodes of one rank each; what they measure is a socket."""
    words = ["probe", "-o", "found.yaml", "--quick", "--budget", "1"]
    outcome = OneCard().launch(tmp_path, ranks=2, args=words, entry="megatron_hexi.cli.main")
    assert outcome.succeeded, outcome.why()
    assert len(read_cluster(tmp_path / "found.yaml").nodes) == 2
