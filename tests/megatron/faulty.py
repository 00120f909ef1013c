"""Trainings with a fault planted, which the comparison with one rank must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_hexi.plan import Plan
from tests.megatron.forked import Trainer
from tests.megatron.launch import TrainingLog
from tests.megatron.test_uneven_training import largest_difference


def assert_fault_is_found(
    fault: str,
    args: Sequence[str | Path],
    plan: Plan,
    reference: TrainingLog,
    forks: Trainer,
    folder: Path,
    difference_of: Callable[[TrainingLog, TrainingLog], float] = largest_difference,
    least: float = 1e-4,
) -> None:
    """Train under a plan with a fault of `tests.megatron.planted`, and compare.

    Args:
        fault: its name.
        args: of the training.
        plan: the training's.
        reference: the training on one rank.
        forks: how ranks start.
        folder: their working directory.
        difference_of: the largest relative difference between two trainings.
        least: the difference that the fault must make at least.
    """
    words = [*args, "--planted", fault]
    log = forks.train(folder, ranks=plan.ranks, args=words, plan=plan, entry="tests.megatron.planted")
    difference = difference_of(log, reference)
    print(f"{fault}: {difference:.1e}")
    assert difference > least
