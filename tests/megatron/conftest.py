"""Runs that tests of real training share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.megatron.forked import Forks
from tests.megatron.launch import TrainingLog
from tests.megatron.test_uneven_training import MODEL


class References(Protocol):
    """Takes a model's arguments; gives weights to start from, and the training without a plan."""

    def __call__(
        self, model: tuple[str, ...], iterations: int = 10, ranks: int = 1
    ) -> tuple[Path, TrainingLog]: ...


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with Forks() as started:
        yield started


@pytest.fixture(scope="session")
def references(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> References:
    """Made when first asked for: CP 1 and CP n would start from different weights, so both load the same."""

    @functools.cache
    def weights(model: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("weights")
        saving = (
            "--train-iters",
            "1",
            "--save",
            folder / "weights",
            "--save-interval",
            "1",
            "--no-save-optim",
        )
        forks.train(folder, ranks=1, args=[*MODEL, *model, *saving])
        return folder / "weights"

    @functools.cache
    def reference(model: tuple[str, ...], iterations: int = 10, ranks: int = 1) -> tuple[Path, TrainingLog]:
        start = weights(model)
        words: list[str | Path] = [*MODEL, *model]
        words += ["--train-iters", str(iterations), "--log-interval", "1", "--load", start, "--finetune"]
        return start, forks.train(tmp_path_factory.mktemp("reference"), ranks=ranks, args=words)

    return reference
