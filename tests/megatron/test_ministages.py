"""Training in ministages is the training on one rank, from one checkpoint, and goes on from others."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.errors import PlanError
from megatron_hexi.options.plan_job import check_stages
from tests.megatron.conftest import References
from tests.megatron.forked import Forks
from tests.megatron.test_option_training import logged
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


def offloading(name: str, *offload: str, slow: bool = True) -> Case:
    """A case whose stages, in the order of the file, say what they offload."""
    case = CASES[name]
    texts = iter(offload)
    lines = []
    for line in case.replicas.splitlines():
        start, found, rest = line.partition("layers:")
        said = next(texts) if found else ""
        if said and start.endswith("{"):
            start += f"{said}, "
        lines.append(start + found + rest)
        if said and not start.endswith(", "):
            lines.append(" " * len(start) + said)
    return replace(case, replicas="\n".join(lines) + "\n", slow=slow)


CASES = {
    # One stage hands to itself; tied embeddings are used by its first ministage and by its last.
    "one-stage": Case(
        """\
- micro_batches: 4
  stages:
  - {layers: [0, 6], ministages: 4, domains: [{ranks: [0], samples: 3}, {ranks: [1], samples: 1, state: 2}]}
""",
        job=SMALL_BUCKETS,
        slow=False,
    ),
    # Two stages have a border each way between them; a domain of uneven tokens and heads.
    "two-stages": Case(
        """\
- micro_batches: 4
  stages:
  - layers: [0, 3]
    ministages: 2
    domains:
    - groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [0], tokens: 90, heads: [0, 5]}
        - {ranks: [1], tokens: 37, heads: [5, 6], state: 4}
  - {layers: [3, 6], ministages: 2, recompute: full, domains: [{ranks: [2]}]}
""",
    ),
    "three-stages": Case(
        """\
- micro_batches: 4
  stages:
  - {layers: [0, 2], ministages: 2, domains: [{ranks: [0, 1]}]}
  - layers: [2, 4]
    ministages: 2
    recompute: selective
    domains: [{ranks: [2], samples: 3}, {ranks: [3], samples: 1}]
  - {layers: [4, 6], ministages: 2, domains: [{ranks: [4, 5]}]}
""",
        (*QK_NORM, *UNTIED),
        SEQUENCE,
        rounding=3e-5,  # as of the same model without ministages
    ),
    # Beside a replica that runs 1F1B, with fewer micro-batches than stages.
    "beside-others": Case(
        """\
- micro_batches: 1
  stages:
  - {layers: [0, 2], ministages: 2, domains: [{ranks: [0]}]}
  - {layers: [2, 4], ministages: 2, domains: [{ranks: [1]}]}
  - {layers: [4, 6], ministages: 2, domains: [{ranks: [2]}]}
- micro_batches: 3
  stages:
  - {layers: [0, 4], domains: [{ranks: [3]}]}
  - {layers: [4, 6], domains: [{ranks: [4]}]}
""",
        job=SMALL_BUCKETS,
    ),
    # All micro-batches forward, then all backward.
    "one-ministage": Case(
        """\
- micro_batches: 4
  stages:
  - {layers: [0, 2], ministages: 1, domains: [{ranks: [0]}]}
  - {layers: [2, 6], ministages: 1, domains: [{ranks: [1]}]}
"""
    ),
    "three-ministages": Case(
        """\
- micro_batches: 4
  stages:
  - {layers: [0, 3], ministages: 3, domains: [{ranks: [0], samples: 2}, {ranks: [1, 2], samples: 2}]}
  - {layers: [3, 6], ministages: 3, domains: [{ranks: [3, 4]}]}
""",
        job=(*SEQUENCE, *SMALL_BUCKETS),
    ),
}

ALL = "offload: [parameters, optimizer, activations]"
ROWS, STATE = "offload: [activations]", "offload: [optimizer]"
OFFLOADED = {
    # Shares of weights, and tied embeddings that stay.
    "one-stage": offloading("one-stage", ALL),
    # Each stage its own: the first keeps shares, the second holds its weights alone.
    "two-stages": offloading("two-stages", ALL, STATE),
    "two-stages-alone": offloading("two-stages", STATE, ALL),
    "sgd": replace(offloading("two-stages", ALL, STATE), model=("--optimizer", "sgd")),
    "three-stages": offloading("three-stages", ALL, "offload: [activations, optimizer]", ALL),
    # Weights that a replica in 1F1B holds too; its first stage steps on the host as well.
    "beside-others": offloading(
        "beside-others", ALL, ALL, "offload: [activations]", "offload: [optimizer]", ""
    ),
    "one-ministage": offloading(
        "one-ministage", "offload: [optimizer, activations]", "offload: [activations]"
    ),
    "three-ministages": offloading("three-ministages", ALL, ALL),
    # Two replicas that offload hold all weights in common, and neither is in step with the other.
    "two-replicas": Case(
        """\
- micro_batches: 3
  stages:
  - {layers: [0, 6], ministages: 3, ALL, domains: [{ranks: [0]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 2], ministages: 2, ALL, domains: [{ranks: [1]}]}
  - {layers: [2, 6], ministages: 2, ALL, domains: [{ranks: [2, 3]}]}
""".replace("ALL", ALL),
        UNTIED,
    ),
    # Weights that one replica keeps in host memory and another on the device; tied embeddings stay in both.
    "by-one-of-two-replicas": Case(
        """\
- micro_batches: 3
  stages:
  - {layers: [0, 6], ministages: 3, ALL, domains: [{ranks: [0]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 6], ministages: 3, STATE, domains: [{ranks: [1]}]}
""".replace("ALL", ALL).replace("STATE", STATE),
        job=SMALL_BUCKETS,
        slow=False,
    ),
    # The same of equal buckets, of stages that end elsewhere.
    "by-some-of-three-replicas": Case(
        """\
- micro_batches: 2
  stages:
  - {layers: [0, 2], ministages: 2, ALL, domains: [{ranks: [0]}]}
  - {layers: [2, 6], ministages: 2, STATE, domains: [{ranks: [1, 2]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 3], ministages: 3, STATE, domains: [{ranks: [3]}]}
  - {layers: [3, 6], ministages: 3, ALL, domains: [{ranks: [4]}]}
- micro_batches: 1
  stages:
  - {layers: [0, 6], domains: [{ranks: [5]}]}
""".replace("ALL", ALL).replace("STATE", STATE),
        UNTIED,
        job=SMALL_BUCKETS,
    ),
}

#: Whole micro-batches dealt to the domains of a stage.
DEALT = {
    # Before one unit; the first stage keeps shares on the host, the second holds its weights alone.
    "before-one": Case(
        """\
- micro_batches: 4
  stages:
  - layers: [0, 2]
    ministages: 2
    ALL
    domains: [{ranks: [0], micro_batches: 3}, {ranks: [1], micro_batches: 1}]
  - {layers: [2, 6], ministages: 2, STATE, domains: [{ranks: [2]}]}
""".replace("ALL", ALL).replace("STATE", STATE),
        slow=False,
    ),
    # All forward, then all backward.
    "one-ministage": Case(
        """\
- micro_batches: 4
  stages:
  - {layers: [0, 2], ministages: 1, domains: [{ranks: [0]}]}
  - {layers: [2, 6], ministages: 1, domains: [{ranks: [1], micro_batches: 3}, {ranks: [2], micro_batches: 1}]}
"""
    ),
    # Between samples of each and whole ones.
    "everywhere": Case(
        """\
- micro_batches: 4
  stages:
  - {layers: [0, 2], ministages: 2, domains: [{ranks: [0], samples: 3}, {ranks: [1], samples: 1}]}
  - layers: [2, 4]
    ministages: 2
    ALL
    domains:
    - {ranks: [2, 3], micro_batches: 2}
    - micro_batches: 2
      groups:
      - segments: [[0, 127]]
        members:
        - {ranks: [4], tokens: 90, heads: [0, 5]}
        - {ranks: [5], tokens: 37, heads: [5, 6], state: 4}
  - {layers: [4, 6], ministages: 2, domains: [{ranks: [6], micro_batches: 1}, {ranks: [7], micro_batches: 3}]}
""".replace("ALL", ALL),
        job=SEQUENCE,
    ),
    "one-stage": Case(
        """\
- micro_batches: 3
  stages:
  - layers: [0, 6]
    ministages: 3
    domains: [{ranks: [0], micro_batches: 2}, {ranks: [1], micro_batches: 1, state: 2}]
- micro_batches: 1
  stages:
  - {layers: [0, 6], domains: [{ranks: [2]}]}
""",
        job=SMALL_BUCKETS,
    ),
}


@pytest.mark.parametrize(
    ("case", "iterations"),
    runs(
        {
            **CASES,
            **{f"{name}-offloaded": case for name, case in OFFLOADED.items()},
            **{f"{name}-dealt": case for name, case in DEALT.items()},
        }
    ),
)
def test_training_is_that_of_one_rank(
    case: Case, iterations: int, forks: Forks, references: References, tmp_path: Path
):
    check_training(case, iterations, forks, references, tmp_path)


def test_saving_behind_the_next_step_is_refused_beside_offload(tmp_path: Path):
    plan = OFFLOADED["two-stages"].plan(tmp_path)
    args = Namespace(hexi_plan="plan.yaml", world_size=3, ffn_hidden_size=None, async_save=True)
    with pytest.raises(PlanError, match=r"offload, and --async-save writes .*; leave out --async-save"):
        check_stages(args, set(), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [CASES["three-ministages"], OFFLOADED["one-stage"]], ids=["stages", "offloaded"]
)
def test_evaluation_gives_the_loss_of_one_rank(case: Case, forks: Forks, references, tmp_path: Path):
    weights, _ = references(MODEL, 4)
    plan = case.plan(tmp_path)
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
