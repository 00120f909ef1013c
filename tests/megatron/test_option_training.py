"""Megatron's options beside uneven plans: the training is the one without context parallelism.

One plan of each case runs always, the others on request: pytest -m "slow or not slow" with this file.
"""

from __future__ import annotations

import re

import pytest

from tests.megatron.conftest import job, skip_what_is_not_there
from tests.megatron.option_cases import CASES, Case
from tests.megatron.test_uneven_training import MODEL, largest_difference

#: Iterations in CI, and of cases on request: as many as the last step of a schedule of batches needs.
IN_CI, ON_REQUEST = 3, 10

RUNS = [
    pytest.param(
        case, name, id=f"{name_of_job}-{name}", marks=[pytest.mark.slow] if case.slow or number else []
    )
    for name_of_job, case in CASES.items()
    for number, name in enumerate(case.plans())
]


@pytest.mark.parametrize(("case", "name"), RUNS)
def test_losses_and_gradient_norms_are_those_without_a_plan(
    case: Case, name, forks, references, documents, tmp_path
):
    check_case(case, name, forks, references, documents, tmp_path)


def check_case(case: Case, name, forks, references, documents, tmp_path):
    """Losses and gradient norms of a job under a plan are those without one."""
    skip_what_is_not_there((*case.model, *case.job, *case.reference))
    data = documents if case.corpus else ()
    iterations = ON_REQUEST if case.slow else IN_CI
    weights, reference = references((*case.model, *data, *case.reference), iterations)
    plan = case.plans()[name]
    log = forks.train(
        tmp_path,
        ranks=plan.units * case.model_parallel,
        args=[*job([*case.model, *data]), *steps(iterations), "--load", weights, "--finetune", *case.job],
        plan=plan,
    )
    difference = largest_difference(log, reference)
    print(f"{len(log.losses)} iterations, losses and gradient norms within {difference:.1e}")
    assert difference < 1e-5


def steps(iterations: int) -> tuple[str, ...]:
    return ("--train-iters", str(iterations), "--log-interval", "1")


def logged(output: str, name: str) -> list[float]:
    """What Megatron's log says of a loss, in order."""
    return [float(value) for value in re.findall(rf"\b{name}: (\S+)", output)]


@pytest.mark.parametrize(
    ("job", "plan", "name"),
    [
        ("experts-seq-loss", "groups", "seq_load_balancing_loss"),
        ("experts-z-loss", "groups", "z_loss"),
        ("multi-token", "groups", "mtp_2 loss"),
    ],
)
@pytest.mark.slow
def test_other_losses_are_logged_as_without_a_plan(job, plan, name, forks, references, tmp_path):
    case = CASES[job]
    skip_what_is_not_there(case.model)
    weights, reference = references(case.model, ON_REQUEST)
    log = forks.train(
        tmp_path,
        ranks=case.plans()[plan].units,
        args=[*MODEL, *steps(ON_REQUEST), "--load", weights, "--finetune", *case.model],
        plan=case.plans()[plan],
    )
    assert len(logged(reference.output, name)) == ON_REQUEST
    assert logged(log.output, name) == pytest.approx(logged(reference.output, name), rel=1e-5)


def test_evaluation_gives_the_loss_without_a_plan(forks, references, tmp_path):
    plans = Case().plans()
    weights, _ = references((), IN_CI)
    args = [*MODEL, "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "2", "--load", weights]
    losses = [
        logged(
            forks.train(tmp_path, ranks=ranks, args=[*args, "--finetune"], plan=plan).output, "lm loss value"
        )
        for ranks, plan in ((1, None), (3, plans["groups"]), (2, plans["no-tokens"]))
    ]
    assert len(losses[0]) >= 3  # after two iterations, after four, and of the test set
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-6)


def test_two_runs_in_deterministic_mode_are_the_same_bits(forks, tmp_path):
    plan = Case().plans()["groups"]
    args = [*job(["--deterministic-mode"]), "--train-iters", "3", "--log-interval", "1"]
    first, second = (
        forks.train(tmp_path / name, ranks=plan.units, args=args, plan=plan) for name in ("one", "two")
    )
    assert len(first.losses) == 3
    assert (first.losses, first.grad_norms) == (second.losses, second.grad_norms)
