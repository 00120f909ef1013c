"""Kinds of models beside features of plans, where `scripts.docs.combinations` names no other test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hexi.plan import LatentColumns, Plan, read_plan
from tests.megatron.checkpoint_contents import tensors_of
from tests.megatron.conftest import References, job, skip_what_is_not_there
from tests.megatron.forked import Forks
from tests.megatron.option_cases import (
    FURTHER_TOKENS,
    HYBRID,
    LATENT,
    LATENT_SPEC,
    ONE_EACH,
    PACKED,
    SINKS,
    WINDOW,
    Case,
)
from tests.megatron.test_checkpoints import RESHARDABLE
from tests.megatron.test_option_training import steps
from tests.megatron.test_stages_training import MODEL as IN_STAGES
from tests.megatron.test_unequal_replicas import BATCH, plan_of
from tests.megatron.test_uneven_training import largest_difference


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        model: its arguments.
        reference: arguments of the run without a plan alone.
        sizes: what the plan's workload says otherwise.
    """

    model: tuple[str, ...]
    reference: tuple[str, ...] = ()
    sizes: dict[str, Any] = field(default_factory=dict)

    def fit(self, plan: Plan) -> Plan:
        return replace(plan, workload=replace(plan.workload, **self.sizes))


LATENT_SIZES = {"kv_heads": 6, "value_dim": 24}
KINDS = {
    "windows-sinks": Kind((*WINDOW, "--window-attn-skip-freq", "2", *SINKS)),
    "latent": Kind(LATENT, LATENT_SPEC, LATENT_SIZES),
    "latent-columns": Kind(LATENT, LATENT_SPEC, LATENT_SIZES | {"latent_exchange": LatentColumns(32, 8)}),
    "prediction": Kind((*FURTHER_TOKENS, "--calculate-per-token-loss")),
    "hybrid": Kind(HYBRID),
}

#: A domain of uneven tokens and heads beside a unit that shares samples with it, before one unit; in
#: ministages, with all that can be in host memory there.
OFFLOADED = """\
version: 2
workload: {seq_length: 127, heads: 6, kv_heads: 2, head_dim: 16, layers: 6}
job: {micro_batch_size: 4}
replicas:
- stages:
  - layers: [0, 3]
    ministages: 2
    offload: [parameters, optimizer, activations]
    domains:
    - samples: 3
      groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [0], tokens: 90, heads: [0, 4]}
        - {ranks: [1], tokens: 37, heads: [4, 6]}
    - {ranks: [2], samples: 1}
  - layers: [3, 6]
    ministages: 2
    offload: [parameters, optimizer, activations]
    domains: [{ranks: [3]}]
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows-sinks", "latent", "latent-columns"])
def test_stages_that_offload_have_each_gradient_of_one_rank(
    name: str, forks: Forks, references: References, tmp_path: Path
):
    kind = KINDS[name]
    path = tmp_path / "plan.yaml"
    path.write_text(OFFLOADED)
    plan = kind.fit(read_plan(path))
    start = references((*IN_STAGES, *kind.model, *kind.reference), 1)[0]
    logs, moments = [], []
    for own, ranks, used in ((kind.reference, 1, None), ((), plan.ranks, plan)):
        folder = tmp_path / str(ranks)
        words: list[str | Path] = [*job((*IN_STAGES, *kind.model)), *own, *steps(3), "--load", start]
        words += ["--finetune", "--save", folder / "saved", "--save-interval", "1"]
        logs.append(forks.train(folder, ranks=ranks, args=words, plan=used))
        prefix = "optimizer.state.exp_avg."
        saved = tensors_of(folder / "saved" / "iter_0000001")
        moments.append({key: value for key, value in saved.items() if key.startswith(prefix)})
    assert largest_difference(logs[1], logs[0]) < 1e-5
    alone, staged = moments
    assert staged.keys() == alone.keys()
    far = {key: float((staged[key] - m).abs().max() / m.abs().max()) for key, m in alone.items()}
    assert max(far.values()) < 2e-4, far


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latent", "latent-columns", "hybrid"])
def test_unequal_replicas_train_as_one_rank(name: str, forks: Forks, references: References, tmp_path: Path):
    kind = KINDS[name]
    skip_what_is_not_there(kind.model)
    start, reference = references((*BATCH, *kind.model, *kind.reference), 10)
    plan = kind.fit(plan_of("three-and-one"))
    words: list[str | Path] = [*job((*BATCH, *kind.model)), *steps(10), "--load", start, "--finetune"]
    log = forks.train(tmp_path, ranks=plan.units, args=words, plan=plan)
    assert largest_difference(log, reference) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, "documents"])
def test_a_checkpoint_goes_on_under_another_plan(name: str, forks: Forks, documents, tmp_path: Path):
    kind = KINDS.get(name) or Kind((*ONE_EACH, *documents, *PACKED))
    skip_what_is_not_there(kind.model)
    plans = {name: kind.fit(plan) for name, plan in Case().plans().items()}
    words: list[str | Path] = [*job(kind.model), *RESHARDABLE, "--train-iters", "4", "--log-interval", "1"]
    saving: list[str | Path] = ["--save", tmp_path / "weights", "--save-interval", "2"]
    whole = forks.train(tmp_path, ranks=3, args=[*words, *saving], plan=plans["groups"])
    (tmp_path / "weights" / "latest_checkpointed_iteration.txt").write_text("2")
    words += ["--load", tmp_path / "weights", "--no-load-rng"]
    log = forks.train(tmp_path, ranks=2, args=words, plan=plans["no-heads"])
    assert log.iterations == [3, 4]
    assert log.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    assert log.grad_norms == pytest.approx(whole.grad_norms[2:], rel=1e-5)
