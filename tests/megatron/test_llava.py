"""Megatron's LLaVAModel in Megatron-LM's loop under uneven plans, beside Megatron alone on one rank."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

from megatron_hexi.plan import read_plan
from tests.megatron.forked import Forks

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("megatron-core") not in SpecifierSet(">=0.19"),
    reason="patched for megatron-core 0.19",
)

SCRIPT = Path(__file__).parent / "llava_script.py"
#: Tokens of a text; with those of its image there are ten more.
TEXT, LENGTH = 31, 41
MODEL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", str(LENGTH), "--max-position-embeddings", "64", "--position-embedding-type", "rope"),
    *("--dataloader-seq-length", str(TEXT), "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-3", "--adam-eps", "1e-5"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--num-workers", "0"),
    *("--train-iters", "4", "--eval-interval", "100", "--eval-iters", "0"),
    "--calculate-per-token-loss",
)
HEADER = """\
version: 2
workload: {seq_length: 41, heads: 4, kv_heads: 4, head_dim: 8, layers: 4, hidden_size: 32}
replicas:
"""
PLANS = {
    "replicas": """\
- micro_batches: 3
  stages:
  - domains:
    - groups:
      - segments: [[0, 9], [30, 41]]
        members:
        - {ranks: [0], tokens: 15, heads: [0, 3]}
        - {ranks: [1], tokens: 5, heads: [3, 4]}
      - segments: [[9, 30]]
        members:
        - {ranks: [2], tokens: 21, heads: [0, 4]}
- micro_batches: 1
  stages:
  - domains: [{ranks: [3]}]
""",
    "pipeline": """\
- stages:
  - domains:
    - groups:
      - segments: [[0, 41]]
        members:
        - {ranks: [0], tokens: 30, heads: [0, 3]}
        - {ranks: [1], tokens: 11, heads: [3, 4]}
""",
    "stages": """\
- stages:
  - {layers: [0, 1], domains: [{ranks: [0]}]}
  - {layers: [1, 4], domains: [{ranks: [1]}]}
""",
}
Trained = tuple[list[float], dict[str, Any]]


def train(forks: Forks, folder: Path, ranks: int, plan: str | None = None, *words: str) -> Trained:
    """Return losses and weights, after a check that ranks agree on their weights."""
    path = folder / f"{plan}.yaml"
    path.write_text(HEADER + PLANS[plan] if plan else "")
    log = forks.train(
        folder,
        ranks=ranks,
        args=[SCRIPT, *MODEL, *words],
        plan=read_plan(path) if plan else None,
        entry="tests.megatron.scripted",
    )
    weights: dict[str, Any] = {}
    for rank in range(ranks):
        for name, weight in torch.load(folder / f"weights-{rank}.pt").items():
            assert name not in weights or torch.equal(weight, weights[name]), name
            weights[name] = weight
    return log.losses, weights


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(forks, tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize(
    ("plan", "words"),
    [("replicas", ()), ("pipeline", ("--pipeline-model-parallel-size", "2"))],
)
def test_losses_and_weights_are_those_of_one_rank(
    plan: str, words: tuple[str, ...], alone: Trained, forks: Forks, tmp_path: Path
):
    losses, weights = train(forks, tmp_path, 4, plan, *words)
    assert len(set(losses)) == 4
    assert losses == pytest.approx(alone[0], rel=1e-5)
    assert weights.keys() == alone[1].keys()
    assert any(name.startswith("vision_model.") for name in weights)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, alone[1][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("plan", "words", "named"),
    [
        ("stages", (), "its stages have layers of their own, and LLaVAModel's encoder is none"),
        ("replicas", ("--dataloader-seq-length", "41"), "LLaVAModel has sequences of 51 tokens of text and"),
    ],
)
def test_other_jobs_are_refused_by_name(
    plan: str, words: tuple[str, ...], named: str, forks: Forks, tmp_path: Path
):
    ranks = 2 if plan == "stages" else 4
    with pytest.raises(AssertionError, match=re.escape(named)):
        train(forks, tmp_path, ranks, plan, *words)
