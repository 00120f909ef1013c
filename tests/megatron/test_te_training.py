"""Transformer Engine's layers, Megatron's default, train under plans as Megatron's own do on one rank.

The extension of Transformer Engine is emulated on the CPU (`te_emulated`); everything else of it and of
Megatron is as on a GPU. References are runs of one rank without a plan and with Megatron's own layers, from
the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.megatron.unit_weights import HOLDINGS
from megatron_hexi.plan import proportional_plan
from tests.megatron import te_emulated
from tests.megatron import test_ministages as ministages
from tests.megatron import test_stages_experts as experts
from tests.megatron import test_stages_training as stages
from tests.megatron import test_unit_weights as weights
from tests.megatron.conftest import References, job
from tests.megatron.forked import Forks
from tests.megatron.option_cases import CASES as OPTIONS
from tests.megatron.test_gpu_training import EXPERTS
from tests.megatron.test_option_training import check_case, steps
from tests.megatron.test_stages_training import check_training
from tests.megatron.test_uneven_training import THREE_AND_ONE, WORKLOAD, largest_difference
from tests.megatron.unit_gradients import ROUNDING
from tests.support.expert_layouts import LAYERS, expert_layout

pytestmark = pytest.mark.skipif(
    not te_emulated.is_available(), reason="Transformer Engine's wheel is not unpacked: make environment"
)


class EmulatedTe(Forks):
    """Ranks with Transformer Engine's layers.

    Checkpoints of Megatron's own layers, which references start from, lack the state that Transformer Engine
    keeps for fp8.
    """

    words = ("--transformer-impl", "transformer_engine", "--dist-ckpt-strictness", "ignore_all")


@pytest.fixture(scope="module")
def te() -> Iterator[EmulatedTe]:
    with EmulatedTe("tests.megatron.te_forked") as started:
        yield started


@pytest.mark.parametrize(
    "fusion",
    [(), pytest.param(("--no-gradient-accumulation-fusion", "--no-rope-fusion"), marks=pytest.mark.slow)],
)
def test_groups_train_as_one_rank(
    fusion: tuple[str, ...], te: EmulatedTe, references: References, tmp_path: Path
):
    weights, reference = references((), 3)
    words: list[str | Path] = [*job(()), *steps(3), "--load", weights, "--finetune", *fusion]
    log = te.train(tmp_path, ranks=4, args=words, plan=THREE_AND_ONE)
    assert largest_difference(log, reference) < 1e-5


STAGES = {
    "tensor-parallel-sizes": stages.CASES["tensor-parallel-sizes"],
    "tensor-parallel-domain": stages.CASES["tensor-parallel-domain"],
    "samples": stages.CASES["samples"],
    "options": stages.CASES["options"],
    "ministages": ministages.CASES["one-stage"],
    "offloaded": ministages.OFFLOADED["two-stages"],
}


#: The others move the same weights in the same pieces, as tests without Transformer Engine compare.
STAGES_IN_CI = ("tensor-parallel-sizes",)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name in STAGES_IN_CI else pytest.mark.slow)
        for name, case in STAGES.items()
    ],
)
def test_stages_train_as_one_rank(case: stages.Case, te: EmulatedTe, references: References, tmp_path: Path):
    check_training(case, 3, te, references, tmp_path)


MASKS = {"documents": ("--no-rope-fusion",), "windows-sinks": ()}


@pytest.mark.parametrize("name", [pytest.param("documents", marks=pytest.mark.slow), "windows-sinks"])
def test_masks_are_those_without_a_plan(
    name: str,
    te: EmulatedTe,
    references: References,
    documents: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(te, "words", (*te.words, *MASKS[name]))
    check_case(OPTIONS[name], "groups", te, references, documents, tmp_path)


@pytest.mark.parametrize("grouped", [pytest.param((), marks=pytest.mark.slow), ("--moe-grouped-gemm",)])
def test_experts_train_as_one_rank(grouped: tuple[str, ...], te: EmulatedTe, tmp_path: Path):
    """One product an expert, and grouped products. Weights have other names than in Megatron's own layers."""
    model = job((*EXPERTS, *grouped))
    alone = proportional_plan(WORKLOAD, [[[1]]])
    save = ("--save", tmp_path / "weights", "--save-interval", "1", "--no-save-optim")
    te.train(tmp_path / "first", ranks=1, args=[*model, *steps(1), *save], plan=alone)
    words: list[str | Path] = [*model, *steps(3), "--load", tmp_path / "weights", "--finetune"]
    reference = te.train(tmp_path / "one", ranks=1, args=words, plan=alone)
    log = te.train(tmp_path / "four", ranks=4, args=words, plan=THREE_AND_ONE)
    assert largest_difference(log, reference) < 1e-5


#: Models with every weight that only layers of Transformer Engine have.
UNIT_MODELS = {
    "attention": weights.MODELS["attention"],
    "latent": replace(weights.MODELS["latent"], reference=()),
    "latent-fused": weights.Model((*weights.MODELS["latent"].words, "--mla-down-proj-fusion"), modes=(True,)),
    "states": weights.hybrid(
        "MGC*E", *weights.LAYER_NORM, *weights.GATED, "--moe-grouped-gemm", modes=(True,)
    ),
    "experts": weights.Model(weights.BIASED, modes=(True,)),
}


@pytest.fixture(scope="module")
def compared(te: EmulatedTe, tmp_path_factory: pytest.TempPathFactory) -> weights.Compared:
    return weights.comparison(te, tmp_path_factory.mktemp("units"), alone_under_plan=True)


@pytest.mark.parametrize(("name", "is_sequence"), weights.modes(UNIT_MODELS))
def test_the_table_is_what_two_ranks_show(name: str, is_sequence: bool, compared: weights.Compared):
    weights.check(compared(UNIT_MODELS[name], is_sequence)[0])


@pytest.mark.slow
@pytest.mark.parametrize("is_sequence", [True, False])
def test_which_gradients_megatron_sums_wrongly(is_sequence: bool, te: EmulatedTe, tmp_path: Path):
    spec = ("--spec", "tests.megatron.latent_spec", "transformer_engine")
    model = weights.evenly(replace(UNIT_MODELS["latent"], reference=spec))
    found = weights.comparison(te, tmp_path)(model, is_sequence, is_stage=None)[0]
    wrong = {name: one.error for name, one in found.items() if not one.error < ROUNDING}
    print(f"{is_sequence=}: {max(wrong.values(), default=0.0):.2f}", *wrong)
    assert bool(wrong) == (not is_sequence)


def test_each_row_of_transformer_engine_is_shown_by_some_model(compared: weights.Compared):
    asked = [compared(UNIT_MODELS[name], is_sequence)[1] for name, is_sequence in weights.modes(UNIT_MODELS)]
    rows = {row for row in HOLDINGS if row[1].startswith("te:")}
    assert rows | {("MoELayer", "router.bias")} <= set.union(*asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    "grouped",
    [
        (),
        ("--moe-grouped-gemm",),
        ("--moe-grouped-gemm", "--recompute-granularity", "selective", "--recompute-modules", "moe_act"),
    ],
    ids=["one-by-one", "grouped", "recomputed"],
)
@pytest.mark.parametrize("layout", ["samples", "slices", "offload"])
def test_stages_train_experts_as_one_rank(
    layout: str, grouped: tuple[str, ...], te: EmulatedTe, tmp_path: Path
):
    model = job((*experts.MODEL, *experts.LOSSES["all"], *grouped))
    alone = proportional_plan(replace(WORKLOAD, layers=LAYERS), [[[1]]])
    save = ("--save", tmp_path / "weights", "--save-interval", "1", "--no-save-optim")
    te.train(tmp_path / "first", ranks=1, args=[*model, *steps(1), *save], plan=alone)
    words: list[str | Path] = [*model, *steps(3), "--load", tmp_path / "weights", "--finetune"]
    reference = te.train(tmp_path / "one", ranks=1, args=words, plan=alone)
    plan = expert_layout(layout, tmp_path)
    log = te.train(tmp_path / layout, ranks=plan.ranks, args=[*words, *experts.SEQUENCE], plan=plan)
    assert largest_difference(log, reference) < 1e-5
