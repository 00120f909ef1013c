"""Latent columns travel in stages of units of several ranks, and beside experts, as on one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.plan import LatentColumns, Workload, proportional_plan, read_plan
from tests.megatron import test_stages_experts as experts
from tests.megatron.conftest import References, job
from tests.megatron.forked import Forks
from tests.megatron.option_cases import FULL, LATENT, LATENT_SPEC
from tests.megatron.test_option_training import steps
from tests.megatron.test_stages_training import MODEL
from tests.megatron.test_uneven_training import largest_difference
from tests.support.expert_layouts import expert_layout

COLUMNS = LatentColumns(32, 8)
#: Two groups of units of two ranks before a single rank.
UNITS = """\
version: 2
workload:
  {seq_length: 127, heads: 6, kv_heads: 6, head_dim: 16, value_dim: 24, layers: 6}
job: {micro_batch_size: 4}
replicas:
- stages:
  - layers: [0, 3]
    domains:
    - groups:
      - segments: [[0, 50], [100, 127]]
        members:
        - {ranks: [0, 1], tokens: 50, heads: [0, 2]}
        - {ranks: [2, 3], tokens: 27, heads: [2, 3]}
      - segments: [[50, 100]]
        members: [{ranks: [4, 5], tokens: 50, heads: [0, 3]}]
  - layers: [3, 6]
    domains: [{ranks: [6]}]
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), (*FULL, "uniform")], ids=["kept", "recomputed"])
def test_units_of_several_ranks(more: tuple[str, ...], forks: Forks, references: References, tmp_path: Path):
    (tmp_path / "plan.yaml").write_text(UNITS)
    plan = read_plan(tmp_path / "plan.yaml")
    plan = replace(plan, workload=replace(plan.workload, latent_exchange=COLUMNS))
    start, reference = references((*MODEL, *LATENT, *LATENT_SPEC), 5)
    words: list[str | Path] = [*job((*MODEL, *LATENT)), *steps(5), "--load", start, "--finetune"]
    words += ["--sequence-parallel", *more]
    log = forks.train(tmp_path / "units", ranks=plan.ranks, args=words, plan=plan)
    assert largest_difference(log, reference) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["uneven", "slices"])
def test_experts(layout: str, forks: Forks, tmp_path: Path):
    """Beside one rank on which they do not travel: Megatron's own spec with experts has no such attention."""
    model: list[str | Path] = [*job((*experts.MODEL, *experts.LOSSES["batches"], *LATENT))]
    alone = proportional_plan(Workload(127, 6, 6, 16, value_dim=24), [[[1]]])
    first: list[str | Path] = [*model, *steps(1), "--save", tmp_path / "weights"]
    forks.train(tmp_path / "first", ranks=1, args=[*first, "--save-interval", "1"], plan=alone)
    words: list[str | Path] = [*model, *steps(3), "--load", tmp_path / "weights", "--finetune"]
    reference = forks.train(tmp_path / "one", ranks=1, args=words, plan=alone)
    plan = expert_layout(layout, tmp_path)
    workload = replace(plan.workload, kv_heads=6, value_dim=24, latent_exchange=COLUMNS)
    plan = replace(plan, workload=workload)
    log = forks.train(tmp_path / layout, ranks=plan.ranks, args=[*words, *experts.SEQUENCE], plan=plan)
    assert largest_difference(log, reference) < 1e-5
