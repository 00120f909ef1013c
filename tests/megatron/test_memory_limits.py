"""A model that fits on no layout without offload trains with it, under a limit that the kernel keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.conftest import References, job
from tests.megatron.forked import Forks, Outcome
from tests.megatron.launch import read_metrics
from tests.megatron.test_uneven_training import largest_difference

#: 16 layers of 3.7 million weights: 16 bytes of each are 948 MB, on two ranks 474 MB each.
MODEL = (
    *("--num-layers", "16", "--hidden-size", "512", "--ffn-hidden-size", "2048", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--untie-embeddings-and-output-weights", "--calculate-per-token-loss", "--eval-iters", "0"),
)
#: Bytes from the building of the model on; Megatron's mock data take 73 MB of them.
LIMIT = 250_000_000
HEADER = """\
version: 2
workload: {seq_length: 32, heads: 6, kv_heads: 2, head_dim: 16, layers: 16}
job: {micro_batch_size: 2}
replicas:
- micro_batches: 2
  stages:
"""
TWO_STAGES = """\
  - {layers: [0, 8], TERMS, domains: [{ranks: [0]}]}
  - {layers: [8, 16], TERMS, domains: [{ranks: [1]}]}
"""
ONE_STAGE = """\
  - {layers: [0, 16], TERMS, domains: [{ranks: [0], samples: 1}, {ranks: [1], samples: 1}]}
"""
ONE_UNIT = """\
  - {layers: [0, 16], TERMS, domains: [{ranks: [0, 1]}]}
"""
EVERYTHING = "offload: [parameters, optimizer, activations]"


@pytest.mark.slow
def test_a_model_that_fits_nowhere_else_trains_with_offload(
    forks: Forks, references: References, tmp_path: Path
):
    weights, whole = references(MODEL, 2, entry="tests.megatron.exact_norm")
    metrics, path = tmp_path / "metrics.jsonl", tmp_path / "plan.yaml"

    def run(replica: str, terms: str) -> Outcome:
        metrics.write_text("")
        path.write_text(HEADER + replica.replace("TERMS", terms))
        words: list[str | Path] = [*job(MODEL), "--train-iters", "2", "--log-interval", "1"]
        words += ["--load", weights, "--finetune"]
        words += ["--hexi-plan", path, "--hexi-metrics", metrics, "--sequence-parallel"]
        words += ["--data-limit", str(LIMIT)]
        return forks.launch(tmp_path, ranks=2, args=words, entry="tests.megatron.limited", timeout=500)

    outcome = run(TWO_STAGES, f"ministages: 8, {EVERYTHING}")
    assert outcome.succeeded, outcome.why()
    within = read_metrics(metrics, "".join(outcome.output))
    difference = largest_difference(within, whole)
    print(f"losses and gradient norms within {difference:.1e}")
    assert difference < 1e-5
    for layout, terms in (
        (TWO_STAGES, "recompute: full"),
        (TWO_STAGES, "ministages: 8, recompute: full"),
        (ONE_STAGE, "ministages: 16, recompute: full"),
        (ONE_UNIT, "recompute: full"),
    ):
        outcome = run(layout, terms)
        assert not outcome.succeeded, terms
        assert any("can't allocate memory" in text for text in outcome.output), outcome.why()
