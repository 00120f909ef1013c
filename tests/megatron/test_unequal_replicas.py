"""Replicas that are no rectangle: other numbers of ranks, other shares of the batch, ranks in any order.

The training is the one on one rank, and no rank computes more than its replica's share of the batch.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_hexi.megatron.samplers import SAMPLER_PATCHES
from megatron_hexi.megatron.session import Session, set_active_session
from megatron_hexi.plan import (
    Domain,
    Group,
    Member,
    Plan,
    Replica,
    Share,
    Stage,
    Workload,
    unit_ranks,
    write_plan,
)
from tests.megatron.conftest import job
from tests.megatron.counted import counts
from tests.megatron.option_cases import (
    APART,
    DEEPER,
    DISTRIBUTED,
    FULL,
    FURTHER_TOKENS,
    OVERLAPPED,
    PACKED,
    PIPELINE,
    SEQUENCE,
    SINKS,
    VIRTUAL,
    WINDOW,
)
from tests.megatron.option_cases import (
    Case as Equal,
)
from tests.megatron.test_checkpoints import RESHARDABLE, loaded_by_stock_megatron
from tests.megatron.test_option_training import IN_CI, ON_REQUEST, logged, steps
from tests.megatron.test_uneven_training import MODEL, SEQ_LENGTH, largest_difference

#: Eight micro-batches of one sequence, so that shares can differ.
BATCH = ("--micro-batch-size", "1", "--global-batch-size", "8")

#: A domain: its groups' segments, then unit, tokens and heads (of six) of each member.
type _Domain = tuple[tuple[Any, ...], ...]

ALONE = ((0, SEQ_LENGTH),)
ZIGZAG = ((0, 50), (77, SEQ_LENGTH))

PLANS: dict[str, list[tuple[_Domain, int | None]]] = {
    # Equal shares, which nobody states.
    "two-and-one": [
        (((ALONE, (0, 90, (0, 4)), (1, 37, (4, 6))),), None),
        (((ALONE, (2, 127, (0, 6))),), None),
    ],
    "three-and-one": [
        (((ZIGZAG, (0, 60, (0, 3)), (1, 40, (3, 6))), (((50, 77),), (2, 27, (0, 6)))), 6),
        (((ALONE, (3, 127, (0, 6))),), 2),
    ],
    # Ranks in any order; one without heads.
    "two-one-one": [
        (((ALONE, (1, 127, (0, 6))),), 1),
        (((ZIGZAG, (0, 100, (0, 6))), (((50, 77),), (3, 27, (0, 6)))), 4),
        (((ALONE, (2, 127, (0, 6))),), 3),
    ],
    # As many ranks each, but not in Megatron's order.
    "in-turn": [
        (((ALONE, (0, 100, (0, 6)), (2, 27, (6, 6))),), 4),
        (((ALONE, (1, 0, (0, 2)), (3, 127, (2, 6))),), 4),
    ],
}


def plan_of(name: str, tensor_parallel: int = 1) -> Plan:
    def heads(span: tuple[int, int]) -> tuple[int, int]:
        return span[0] // tensor_parallel, span[1] // tensor_parallel

    workload = Workload(SEQ_LENGTH, heads=6, kv_heads=2, head_dim=16, tensor_parallel=tensor_parallel)

    def replica(domain: _Domain, share: int | None) -> Replica:
        groups = tuple(
            Group(
                segments,
                tuple(
                    Member(unit_ranks(workload, unit), tokens, heads(span)) for unit, tokens, span in members
                ),
            )
            for segments, *members in domain
        )
        return Replica((Stage((Domain(groups),)),), share)

    return Plan(workload, tuple(replica(*one) for one in PLANS[name]))


@dataclass(frozen=True)
class Case:
    """A job under an unequal plan.

    Attributes:
        plan: its name.
        model: arguments that the run on one rank has too.
        job: arguments of the run under the plan alone.
        documents: whether both read a data set of documents, and keep them apart.
        layers: attention layers of a rank.
        slow: whether it runs on request only.
    """

    plan: str
    model: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    documents: bool = False
    layers: int = 2
    slow: bool = True

    @property
    def tensor_parallel(self) -> int:
        return 2 if "--tensor-model-parallel-size" in self.job else 1

    def shares(self) -> list[int]:
        """Micro-batches of each rank of the job."""
        replicas = plan_of(self.plan).replicas
        share = {
            member.number: replica.micro_batches or 8 // len(replicas)
            for replica in replicas
            for member in replica.domain.members
        }
        stage = [share[rank] for rank in range(len(share)) for _ in range(self.tensor_parallel)]
        return stage * (2 if "--pipeline-model-parallel-size" in self.job else 1)


CASES = {
    "two-and-one": Case("two-and-one"),
    "three-and-one": Case("three-and-one"),
    "two-one-one": Case("two-one-one", slow=False),
    "in-turn": Case("in-turn"),
    "distributed-optimizer": Case("three-and-one", job=OVERLAPPED, slow=False),
    "small-buckets": Case("two-one-one", job=(*OVERLAPPED, "--ddp-bucket-size", "1000")),
    "recompute": Case("two-one-one", job=(*FULL, "uniform")),
    "masked-loss": Case("two-and-one", ("--eod-mask-loss", "--calculate-per-token-loss")),
    "multi-token": Case("three-and-one", (*FURTHER_TOKENS, "--calculate-per-token-loss"), layers=4),
    "windows-sinks": Case("three-and-one", (*WINDOW, *SINKS)),
    "documents": Case("three-and-one", job=PACKED, documents=True),
    "documents-pipeline": Case("two-one-one", job=(*PACKED, *PIPELINE), documents=True, layers=1),
    "cyclic": Case("three-and-one", ("--dataloader-type", "cyclic")),
    "workers": Case("two-one-one", job=("--num-workers", "2")),
    "sequence-parallel": Case("two-and-one", job=SEQUENCE),
    "pipeline": Case("two-one-one", job=PIPELINE, layers=1),
    "virtual-pipeline": Case("three-and-one", DEEPER, VIRTUAL),
    "tensor-pipeline": Case("two-and-one", job=(*SEQUENCE, *PIPELINE, *DISTRIBUTED), layers=1),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if case.slow else [])
        for name, case in CASES.items()
    ],
)
def test_training_is_that_of_one_rank(case: Case, forks, references, documents, tmp_path):
    model = (*BATCH, *case.model, *(documents if case.documents else ()), "--log-params-norm")
    iterations = ON_REQUEST if case.slow else IN_CI
    weights, reference = references((*model, *(APART if case.documents else ())), iterations)
    log = forks.train(
        tmp_path,
        ranks=len(case.shares()),
        args=[*job(model), *steps(iterations), *case.job, "--load", weights, "--finetune"],
        plan=plan_of(case.plan, case.tensor_parallel),
        entry="tests.megatron.counted",
    )
    difference = largest_difference(log, reference)
    print(f"{len(log.losses)} iterations, losses and gradient norms within {difference:.1e}")
    assert difference < 1e-5
    for name in ("consumed samples", "learning rate", "global batch size"):
        assert len(column(log.output, name)) == iterations
        assert column(log.output, name) == column(reference.output, name)
    norms = [[float(norm) for norm in column(run.output, "params norm")] for run in (log, reference)]
    assert len(norms[1]) == iterations
    if "--overlap-param-gather" not in case.job:  # Megatron takes the norm before new weights are gathered
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert counts(log.output) == [iterations * share * case.layers for share in case.shares()]


def column(output: str, name: str) -> list[str]:
    """What Megatron's log says of something, in order."""
    return re.findall(rf"\b{name}: +(\S+)", output)


@pytest.mark.slow
def test_other_losses_are_logged_as_on_one_rank(forks, references, tmp_path):
    model = (*BATCH, *FURTHER_TOKENS, "--calculate-per-token-loss")
    weights, reference = references(model, ON_REQUEST)
    words = [*MODEL, *steps(ON_REQUEST), *model, "--load", weights, "--finetune"]
    log = forks.train(tmp_path, ranks=4, args=words, plan=plan_of("three-and-one"))
    assert len(logged(reference.output, "mtp_2 loss")) == ON_REQUEST
    assert logged(log.output, "mtp_2 loss") == pytest.approx(logged(reference.output, "mtp_2 loss"), rel=1e-5)


@pytest.mark.slow
def test_evaluation_gives_the_loss_of_one_rank(forks, references, tmp_path):
    weights, _ = references(BATCH)
    words = [*MODEL, *BATCH, "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "2"]
    runs = [(1, None), *((plan_of(name).units, plan_of(name)) for name in ("three-and-one", "two-one-one"))]
    losses = [
        logged(
            forks.train(
                tmp_path, ranks=ranks, args=[*words, "--load", weights, "--finetune"], plan=plan
            ).output,
            "lm loss value",
        )
        for ranks, plan in runs
    ]
    assert len(losses[0]) >= 3  # after two iterations, after four, and of the test set
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-6)


@pytest.fixture(scope="module")
def saved(forks, references, tmp_path_factory):
    """Four iterations under an unequal plan, with what they saved after two."""
    folder = tmp_path_factory.mktemp("saved")
    words = [*MODEL, *BATCH, *RESHARDABLE, "--load", references(BATCH)[0], "--finetune", "--train-iters", "4"]
    words += ["--save", folder / "weights", "--save-interval", "2"]
    log = forks.train(folder, ranks=4, args=words, plan=plan_of("three-and-one"))
    (folder / "weights" / "latest_checkpointed_iteration.txt").write_text("2")
    return folder / "weights", log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        pytest.param(4, plan_of("two-one-one"), id="other-replicas"),
        pytest.param(4, Equal(replicas=True).plans()["replicas"], id="equal-replicas"),
        pytest.param(1, None, id="no-plan"),
    ],
)
def test_training_goes_on_under_any_replicas(ranks, plan, saved, forks, tmp_path):
    weights, whole = saved
    words = [*MODEL, *BATCH, *RESHARDABLE, "--train-iters", "4", "--load", weights, "--no-load-rng"]
    log = forks.train(tmp_path, ranks=ranks, args=words, plan=plan)
    assert log.iterations == [3, 4]
    assert log.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    assert log.grad_norms == pytest.approx(whole.grad_norms[2:], rel=1e-5)


@pytest.mark.slow
def test_what_one_rank_saved_goes_on_under_unequal_replicas(forks, references, tmp_path):
    words = [*MODEL, *BATCH, *RESHARDABLE, "--train-iters", "4"]
    saving = ["--load", references(BATCH)[0], "--finetune", "--save", tmp_path / "weights"]
    whole = forks.train(tmp_path, ranks=1, args=[*words, *saving, "--save-interval", "2"])
    (tmp_path / "weights" / "latest_checkpointed_iteration.txt").write_text("2")
    loading = ["--load", tmp_path / "weights", "--no-load-rng"]
    log = forks.train(tmp_path, ranks=4, args=[*words, *loading], plan=plan_of("two-one-one"))
    assert log.iterations == [3, 4]
    assert log.losses == pytest.approx(whole.losses[2:], rel=1e-5)


@pytest.mark.slow
def test_stock_megatron_loads_what_unequal_replicas_saved(saved, forks, references, tmp_path):
    """Its weights after two iterations are those of a training without a plan from the same start."""
    words = [*MODEL, *BATCH, *RESHARDABLE, "--load", references(BATCH)[0], "--finetune", "--train-iters", "4"]
    saving = ["--save", tmp_path / "alone", "--save-interval", "2", "--exit-interval", "2"]
    forks.train(tmp_path, ranks=1, args=[*words, *saving])
    found = loaded_by_stock_megatron(
        tmp_path / "alone" / "iter_0000002", saved[0] / "iter_0000002", tmp_path / "store"
    )
    assert found["ours"] == ["hexi_plan"]
    assert len(found["apart"]) > 10
    assert max(found["apart"].values()) < 1e-5


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        pytest.param(4, ["--global-batch-size", "6"], "take 8 micro-batches of 1, 8 sequences", id="batch"),
        pytest.param(3, [], "replicas of 3 + 1 ranks", id="a-rank-too-few", marks=pytest.mark.slow),
        pytest.param(
            8,
            [*DEEPER, *VIRTUAL, "--microbatch-group-size-per-virtual-pipeline-stage", "4"],
            "replicas[1] takes 2 micro-batches, an interleaved pipeline runs 4 at a time",
            id="interleaved",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            ["--num-experts", "4"],
            "--num-experts does not work with unequal replicas",
            id="option",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_ends_every_rank_with_one_line(ranks, words, message, forks, tmp_path):
    write_plan(plan_of("three-and-one"), tmp_path / "plan.yaml")
    args = [*MODEL, *BATCH, "--train-iters", "1", "--hexi-plan", tmp_path / "plan.yaml", *words]
    outcome = forks.launch(tmp_path, ranks=ranks, args=args)
    assert outcome.codes == [2] * ranks
    for output in outcome.output:
        [line] = [line for line in output.splitlines() if line.startswith("hexi: error:")]
        assert message in line
        assert "Traceback" not in output


@pytest.mark.parametrize("patch", SAMPLER_PATCHES, ids=lambda patch: patch.target.split(":")[1])
def test_samplers_deal_every_micro_batch_once_even_where_an_epoch_ends_inside_a_batch(patch, monkeypatch):
    monkeypatch.setattr("megatron.training.get_args", lambda: SimpleNamespace(iteration=0))
    shares = [Share(0, 3, 4), Share(3, 1, 4)]
    drawn: list[list[int]] = [[], []]
    for share, numbers in zip(shares, drawn, strict=True):
        sampler = SimpleNamespace(left=iter(range(40)))
        draw = patch.build(lambda self: itertools.islice(self.left, 10))
        set_active_session(cast(Session, SimpleNamespace(share=share)))
        try:
            for _ in range(4):  # epochs of ten micro-batches, which are two and a half global batches
                numbers += draw(sampler)
        finally:
            set_active_session(None)
    assert drawn[1] == list(range(3, 40, 4))
    assert sorted(drawn[0] + drawn[1]) == list(range(40))
