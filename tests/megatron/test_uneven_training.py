"""Real Megatron training under uneven plans, beside the same training on one rank from one checkpoint.

Set MEGATRON_LM to a Megatron-LM checkout of the installed version to train through its unmodified
pretrain_gpt.py under torchrun, 20 iterations; without it, 6 through our own entry point.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean
from typing import Protocol

import pytest

from megatron_hexi.plan import (
    Domain,
    Group,
    Member,
    Plan,
    Replica,
    Stage,
    Workload,
    proportional_plan,
    write_plan,
)
from tests.megatron.launch import TrainingLog, train

SEQ_LENGTH = 127  # prime to every number of ranks
MODEL = (
    *("--num-layers", "2", "--hidden-size", "96", "--num-attention-heads", "6", "--kv-channels", "16"),
    *("--group-query-attention", "--num-query-groups", "2", "--swiglu", "--normalization", "RMSNorm"),
    *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)),
    *("--position-embedding-type", "rope", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3", "--min-lr", "1e-4"),
    *("--mock-data", "--split", "90,5,5", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"),
    *("--num-workers", "0", "--eval-interval", "1000", "--eval-iters", "1"),
)
WORKLOAD = Workload(SEQ_LENGTH, heads=6, kv_heads=2, head_dim=16, layers=2, hidden_size=96)
ITERATIONS = 20 if "MEGATRON_LM" in os.environ else 6

# The KV heads 0 and 1 of the first group are each used by two of its members.
THREE_AND_ONE = Plan(
    WORKLOAD,
    (
        Replica(
            (
                Stage(
                    (
                        Domain(
                            (
                                Group(
                                    ((0, 50), (77, 127)),
                                    (
                                        Member((0,), 51, (0, 2)),
                                        Member((1,), 36, (2, 5)),
                                        Member((2,), 13, (5, 6)),
                                    ),
                                ),
                                Group(((50, 77),), (Member((3,), 27, (0, 6)),)),
                            )
                        ),
                    )
                ),
            )
        ),
    ),
)


def with_tensor_parallel(size: int) -> Workload:
    return Workload(
        SEQ_LENGTH, heads=6, kv_heads=2, head_dim=16, layers=2, hidden_size=96, tensor_parallel=size
    )


def one_domain(*members: tuple[int, tuple[int, int]]) -> Plan:
    """All ranks in one group: tokens and heads of each."""
    group = Group(((0, SEQ_LENGTH),), tuple(Member((i,), t, h) for i, (t, h) in enumerate(members)))
    return Plan(WORKLOAD, (Replica((Stage((Domain((group,)),)),)),))


class Run(Protocol):
    """Trains on some ranks, with more arguments, under a plan if there is one."""

    def __call__(
        self, folder: Path, ranks: int, *args: str, plan: Plan | None = None, iterations: int = ITERATIONS
    ) -> TrainingLog: ...


@pytest.fixture(scope="module")
def run(forks) -> Run:
    checkout = os.environ.get("MEGATRON_LM")
    script = ["-m", "megatron_hexi.run", str(Path(checkout) / "pretrain_gpt.py")] if checkout else None

    def train_on(
        folder: Path, ranks: int, *args: str, plan: Plan | None = None, iterations: int = ITERATIONS
    ) -> TrainingLog:
        words = [*MODEL, "--train-iters", str(iterations), *args]
        if script is None:
            return forks.train(folder, ranks=ranks, args=words, plan=plan)
        path = None
        if plan is not None:
            path = folder / f"plan-{len(list(folder.glob('plan-*')))}.yaml"
            write_plan(plan, path)
        return train(folder, ranks=ranks, args=words, plan=path, entry=script)

    return train_on


@pytest.fixture(scope="module")
def checkpoint(run, tmp_path_factory) -> Path:
    """Weights that every run starts from: CP 1 and CP n would initialise different ones."""
    folder = tmp_path_factory.mktemp("checkpoint")
    run(folder, 1, "--save", str(folder / "weights"), "--save-interval", "1", iterations=1)
    return folder / "weights"


@pytest.fixture(scope="module")
def reference(run, checkpoint, tmp_path_factory) -> TrainingLog:
    """One rank, without a plan: Megatron's own attention."""
    return run(tmp_path_factory.mktemp("reference"), 1, "--load", str(checkpoint), "--finetune")


def largest_difference(log: TrainingLog, reference: TrainingLog) -> float:
    assert log.iterations == reference.iterations
    pairs = [
        *zip(log.losses, reference.losses, strict=True),
        *zip(log.grad_norms, reference.grad_norms, strict=True),
    ]
    return max(abs(found - true) / abs(true) for found, true in pairs)


EXACT = {
    "cp4-groups-of-3-and-1": (4, THREE_AND_ONE, ()),
    "cp4-micro-batch-1-recompute": (
        4,
        THREE_AND_ONE,
        ("--micro-batch-size", "1", "--recompute-granularity", "selective"),
    ),
    "dp2-cp2-distributed-optimizer": (
        4,
        proportional_plan(WORKLOAD, [[[3], [1]], [[2, 5]]]),
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "tp2-cp2": (
        4,
        proportional_plan(with_tensor_parallel(2), [[[3, 1]]]),
        ("--tensor-model-parallel-size", "2"),
    ),
    "tp2-cp2-sequence-parallel": (
        4,
        proportional_plan(with_tensor_parallel(2), [[[3], [1]]]),
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ),
    "pp2-cp2-full-recompute": (
        4,
        proportional_plan(WORKLOAD, [[[3], [1]]]),
        (
            *("--pipeline-model-parallel-size", "2", "--recompute-granularity", "full"),
            *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ),
    ),
    "rank-without-tokens": (2, one_domain((SEQ_LENGTH, (0, 2)), (0, (2, 6))), ()),
    "rank-without-heads": (2, one_domain((100, (0, 6)), (27, (0, 0))), ()),
}


#: The others repeat them with another kind of parallelism, which `test_option_training.py` has too.
IN_CI = ("cp4-groups-of-3-and-1", "tp2-cp2-sequence-parallel", "rank-without-tokens", "rank-without-heads")


@pytest.mark.parametrize(
    ("ranks", "plan", "args"),
    [
        pytest.param(*case, id=name, marks=() if name in IN_CI else pytest.mark.slow)
        for name, case in EXACT.items()
    ],
)
def test_losses_and_gradient_norms_are_those_of_one_rank(
    run, ranks, plan, args, checkpoint, reference, tmp_path
):
    log = run(tmp_path, ranks, "--load", str(checkpoint), "--finetune", *args, plan=plan)
    difference = largest_difference(log, reference)
    print(f"{len(log.losses)} iterations, losses and gradient norms within {difference:.1e}")
    assert difference < 1e-5


@pytest.mark.slow  # beside documents, test_option_training.py does it always
def test_learned_positions_are_taken_at_the_true_positions(run, tmp_path):
    args = ("--position-embedding-type", "learned_absolute")
    run(tmp_path, 1, *args, "--save", str(tmp_path / "weights"), "--save-interval", "1", iterations=1)
    loaded = (*args, "--load", str(tmp_path / "weights"), "--finetune")
    reference = run(tmp_path, 1, *loaded, iterations=3)
    log = run(tmp_path, 4, *loaded, plan=THREE_AND_ONE, iterations=3)
    assert largest_difference(log, reference) < 1e-5


def error(log: TrainingLog, exact: TrainingLog) -> tuple[float, float]:
    """Relative root-mean-square errors of losses and of gradient norms over all iterations."""
    assert log.iterations == exact.iterations

    def rms(found: list[float], true: list[float]) -> float:
        return fmean((here / there - 1) ** 2 for here, there in zip(found, true, strict=True)) ** 0.5

    return rms(log.losses, exact.losses), rms(log.grad_norms, exact.grad_norms)


def test_bf16_is_as_near_to_fp32_as_one_rank_is(run, checkpoint, reference, tmp_path):
    args = ("--bf16", "--load", str(checkpoint), "--finetune")
    plain = error(run(tmp_path, 1, *args), reference)
    uneven = error(run(tmp_path, 4, *args, plan=THREE_AND_ONE), reference)
    for what, found, allowed in zip(("losses", "gradient norms"), uneven, plain, strict=True):
        print(f"{what}: bf16 off fp32 by {found:.1e} under the plan, {allowed:.1e} on one rank")
        assert found <= 2 * allowed


@pytest.mark.slow  # through our own entry point, test_checkpoints.py does it always
def test_a_checkpoint_is_continued_under_any_plan_and_none(run, checkpoint, tmp_path):
    """Saved under one plan after some iterations, continued under others as if nothing had changed."""
    optimizer = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
    saved = ("--save", str(tmp_path / "weights"), "--save-interval", "3")
    whole = run(tmp_path, 4, *optimizer, *saved, plan=THREE_AND_ONE, iterations=6)
    assert whole.iterations == [1, 2, 3, 4, 5, 6]
    (tmp_path / "weights" / "latest_checkpointed_iteration.txt").write_text("3")
    continued = {
        "another plan": (2, proportional_plan(WORKLOAD, [[[5], [2]]])),
        "even shards": (4, proportional_plan(WORKLOAD, [[[1, 1, 1, 1]]])),
        "no context parallelism": (1, None),
    }
    for name, (ranks, plan) in continued.items():
        loaded = ("--load", str(tmp_path / "weights"))
        log = run(tmp_path, ranks, *optimizer, *loaded, plan=plan, iterations=6)
        assert log.iterations == [4, 5, 6], name
        for found, true in zip(log.losses, whole.losses[3:], strict=True):
            assert abs(found - true) / true < 1e-5, name
        print(f"{name}: {log.losses}")
