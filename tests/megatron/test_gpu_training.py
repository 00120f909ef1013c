"""Ranks on one GPU train as one rank on the CPU does: with CUDA's streams, Triton's kernels and real NCCL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.cluster import read_cluster
from tests.megatron import test_ministages as ministages
from tests.megatron import test_stages_training as stages
from tests.megatron.conftest import References, job
from tests.megatron.launch import TrainingLog
from tests.megatron.one_card import OneCard
from tests.megatron.option_cases import CASES as OPTIONS
from tests.megatron.test_option_training import check_case, steps
from tests.megatron.test_replanning import OTHERS, swapping
from tests.megatron.test_stages_training import SMALL_BUCKETS, check_training
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


def test_groups_train_as_one_rank(references: References, tmp_path: Path):
    weights, reference = references((), 4)
    words: list[str | Path] = [*job(()), *steps(4), "--load", weights, "--finetune"]
    log = OneCard().train(tmp_path, ranks=4, args=words, plan=THREE_AND_ONE)
    assert largest_difference(log, reference) < 1e-5


def test_groups_in_bf16_are_as_near_as_one_rank(references: References, tmp_path: Path):
    """By the kernels for half precision; one rank by Megatron's own attention."""
    weights, exact = references((), 6)
    words: list[str | Path] = [*job(()), *steps(6), "--load", weights, "--finetune", "--bf16"]
    plain = OneCard().train(tmp_path / "plain", ranks=1, args=words)
    ours = OneCard().train(tmp_path / "ours", ranks=4, args=words, plan=THREE_AND_ONE)
    assert _error(ours, exact) < 2 * _error(plain, exact)


def _error(log: TrainingLog, exact: TrainingLog) -> float:
    return sum(abs(a / b - 1) for a, b in zip(log.losses, exact.losses, strict=True))


@pytest.mark.parametrize("case", UNEVEN.values(), ids=UNEVEN)
def test_uneven_stages_train_as_one_rank(case: stages.Case, references: References, tmp_path: Path):
    check_training(case, 4, OneCard(), references, tmp_path)


@pytest.mark.parametrize("name", ["documents", "windows-sinks"])
def test_masks_are_those_without_a_plan(name: str, references: References, documents, tmp_path: Path):
    check_case(OPTIONS[name], "groups", OneCard(), references, documents, tmp_path)


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
