"""Training of stages that differ with their ministages interleaved is the training on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.conftest import References
from tests.megatron.faulty import assert_fault_is_found
from tests.megatron.forked import Forks
from tests.megatron.option_cases import APART, FURTHER_TOKENS, ONE_EACH, PACKED, SINKS, WINDOW
from tests.megatron.planted import INTERLEAVING_FAULTS
from tests.megatron.test_option_training import logged
from tests.megatron.test_stages_multi_token import compare
from tests.megatron.test_stages_training import (
    MODEL,
    QK_NORM,
    SEQUENCE,
    SMALL_BUCKETS,
    UNTIED,
    Case,
    check_training,
    runs,
    words,
)
from tests.megatron.test_uneven_training import largest_difference

#: A domain of uneven tokens and heads, and one of two groups.
DOMAINS = """\
- micro_batches: 4
  order: interleaved
  stages:
  - layers: [0, 3]
    ministages: 2
    recompute: full
    domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [0], tokens: 90, heads: [0, 5]}
        - {ranks: [1], tokens: 37, heads: [5, 6], state: 4}
  - layers: [3, 6]
    ministages: [1, 2]
    domains:
    - groups:
      - segments: [[0, 40], [80, 127]]
        members:
        - {ranks: [2], tokens: 64, heads: [0, 4]}
        - {ranks: [3], tokens: 23, heads: [4, 6]}
      - segments: [[40, 80]]
        members: [{ranks: [4], tokens: 40, heads: [0, 6]}]
"""
SAMPLES = """\
- micro_batches: 4
  order: interleaved
  stages:
  - {layers: [0, 3], ministages: 3, domains: [{ranks: [0], samples: 2}, {ranks: [1, 2], samples: 2}]}
  - {layers: [3, 6], ministages: 3, domains: [{ranks: [3, 4]}]}
"""

CASES = {
    # A unit of two ranks before one of one: one ministage has three layers, the others one.
    "tensor-parallel-sizes": Case(
        """\
- micro_batches: 4
  order: interleaved
  stages:
  - {layers: [0, 4], ministages: [3, 1], domains: [{ranks: [0, 1]}]}
  - {layers: [4, 6], ministages: 2, domains: [{ranks: [2]}]}
""",
        job=(*SEQUENCE, *SMALL_BUCKETS),
        slow=False,
    ),
    # Three micro-batches of two stages, which make a group and a half, and one of three stages.
    "depths": Case(
        """\
- micro_batches: 3
  order: interleaved
  stages:
  - {layers: [0, 4], ministages: 2, domains: [{ranks: [0]}]}
  - {layers: [4, 6], ministages: 2, domains: [{ranks: [1]}]}
- micro_batches: 1
  order: interleaved
  stages:
  - {layers: [0, 2], ministages: 2, domains: [{ranks: [2]}]}
  - {layers: [2, 4], ministages: 2, domains: [{ranks: [3], state: 3}]}
  - {layers: [4, 6], ministages: 2, domains: [{ranks: [4]}]}
""",
        job=SMALL_BUCKETS,
        slow=False,
    ),
    "three-stages": Case(
        """\
- micro_batches: 4
  order: interleaved
  stages:
  - {layers: [0, 2], ministages: 2, domains: [{ranks: [0, 1]}]}
  - layers: [2, 4]
    ministages: 2
    recompute: selective
    domains: [{ranks: [2], samples: 3}, {ranks: [3], samples: 1}]
  - {layers: [4, 6], ministages: 2, recompute: full, domains: [{ranks: [4, 5]}]}
""",
        (*QK_NORM, *UNTIED),
        SEQUENCE,
        rounding=3e-5,  # as of the same model without ministages
    ),
    "domains": Case(DOMAINS),
    "domains-windows-sinks": Case(DOMAINS, (*WINDOW, *SINKS), SMALL_BUCKETS),
    "samples": Case(SAMPLES, job=(*SEQUENCE, *SMALL_BUCKETS)),
    # Beside a replica that runs 1F1B, and one whose ministages follow each other.
    "beside-other-orders": Case(
        """\
- micro_batches: 2
  order: interleaved
  stages:
  - {layers: [0, 3], ministages: [1, 2], offload: [optimizer], domains: [{ranks: [0]}]}
  - {layers: [3, 6], ministages: [2, 1], domains: [{ranks: [1]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 3], ministages: 3, domains: [{ranks: [2]}]}
  - {layers: [3, 6], ministages: 3, domains: [{ranks: [3]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 4], domains: [{ranks: [4]}]}
  - {layers: [4, 6], domains: [{ranks: [5, 6]}]}
""",
        UNTIED,
        SMALL_BUCKETS,
    ),
    "four-ministages": Case(
        """\
- micro_batches: 4
  order: interleaved
  stages:
  - layers: [0, 2]
    ministages: 2
    domains: [{ranks: [0], samples: 1}, {ranks: [1], samples: 3, state: 2}]
  - {layers: [2, 6], ministages: [1, 3], recompute: selective, domains: [{ranks: [2, 3]}]}
""",
        job=SEQUENCE,
    ),
}


@pytest.mark.parametrize(("case", "iterations"), runs(CASES))
def test_training_is_that_of_one_rank(
    case: Case, iterations: int, forks: Forks, references: References, tmp_path: Path
):
    check_training(case, iterations, forks, references, tmp_path)


ITERATIONS = [4, pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.parametrize("iterations", ITERATIONS)
def test_documents_pass_interleaved_ministages(iterations, forks, references, documents, tmp_path):
    """Rows of a micro-batch wait for its documents, which the backward passes find again."""
    model = ("--num-layers", "6", *ONE_EACH, *documents)
    weights, reference = references((*model, *APART), iterations=iterations)
    case = Case(DOMAINS)
    plan = case.plan(tmp_path, micro_batch_size=1)
    args = words((*model, *PACKED), iterations, weights, ())
    log = forks.train(tmp_path, ranks=plan.ranks, args=args, plan=plan)
    assert largest_difference(log, reference) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [4, 20])
@pytest.mark.parametrize("name", ["depths", "samples"])
def test_further_tokens_are_predicted_by_the_last_ministage(
    name, iterations, forks, references, documents, tmp_path
):
    model = (*MODEL, *FURTHER_TOKENS, *documents, "--eod-mask-loss")
    weights, reference = references(model, iterations)
    plan = CASES[name].plan(tmp_path)
    args = words(model, iterations, weights, CASES[name].job)
    compare(forks.train(tmp_path, ranks=plan.ranks, args=args, plan=plan), reference)


@pytest.mark.slow
def test_evaluation_gives_the_loss_of_one_rank(forks: Forks, references, tmp_path: Path):
    weights, _ = references(MODEL, 4)
    plan = CASES["depths"].plan(tmp_path)
    evaluating = ("--eval-interval", "2", "--eval-iters", "2")
    losses = [
        logged(
            forks.train(
                tmp_path / str(ranks), ranks=ranks, args=words(MODEL, 4, weights, evaluating), plan=given
            ).output,
            "lm loss value",
        )
        for ranks, given in ((1, None), (plan.ranks, plan))
    ]
    assert len(losses[0]) >= 3  # after two iterations, after four, and of the test set
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["rows-in-another-order", "a-holder-adds-nothing", *INTERLEAVING_FAULTS])
def test_the_comparison_finds_a_fault(fault: str, forks: Forks, references: References, tmp_path: Path):
    weights, reference = references(MODEL, 4)
    plan = CASES["tensor-parallel-sizes"].plan(tmp_path)
    args = words(MODEL, 4, weights, SMALL_BUCKETS)
    assert_fault_is_found(fault, args, plan, reference, forks, tmp_path, least=1e-3)
