"""Runs that tests of real training share."""

from __future__ import annotations

import functools
import importlib.metadata
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy
import pytest
from packaging.specifiers import SpecifierSet

from megatron_hexi.options.refusals import refused
from tests.megatron.forked import ENTRY, Forks
from tests.megatron.launch import TrainingLog
from tests.megatron.test_uneven_training import MODEL


def job(words: Sequence[str]) -> list[str]:
    """`MODEL` with more arguments; they take the place of what cannot stand beside them."""
    instead = {
        "--data-path": ("--mock-data",),
        "--multi-latent-attention": ("--group-query-attention",),
        "--step-batch-size-schedule": ("--global-batch-size", "4"),
    }
    base = list(MODEL)
    for new, old in instead.items():
        if new in words:
            place = base.index(old[0])
            assert base[place : place + len(old)] == list(old)
            del base[place : place + len(old)]
    return [*base, *words]


def skip_what_is_not_there(words: Sequence[str]) -> None:
    """Skip a test of what an earlier megatron-core does not have, or what is refused with it, by name.

    Args:
        words: arguments beside those of `MODEL`.
    """
    version = importlib.metadata.version("megatron-core")
    if version in SpecifierSet(">=0.19"):
        return
    parser = _parser()
    known = {flag for action in parser._actions for flag in action.option_strings}
    missing = {word for word in words if word.startswith("--")} - known
    if missing:
        pytest.skip(f"megatron-core {version} has no {', '.join(sorted(missing))}")
    args = parser.parse_args(job(words))
    for option in refused():
        if option.versions and version in SpecifierSet(option.versions) and option.used(args):
            pytest.skip(f"{option.option}: refused with megatron-core {version}, {option.reason}")


@functools.cache
def _parser() -> ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


class References(Protocol):
    """Takes a model's arguments; gives weights to start from, and the training without a plan."""

    def __call__(
        self, model: tuple[str, ...], iterations: int = 10, ranks: int = 1, entry: str = ENTRY
    ) -> tuple[Path, TrainingLog]: ...


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments for a data set of documents of wildly different length, each with an end of its own.

    With `job` they take the place of the mock data.
    """
    return write_documents(tmp_path_factory.mktemp("documents"))


def write_documents(folder: Path) -> tuple[str, ...]:
    """Write the data set of `documents` into a folder, and give its arguments."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = folder / "documents"
    generator = numpy.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in numpy.exp(generator.uniform(0, numpy.log(300), size=400)).astype(int):
        document = numpy.append(generator.integers(0, 254, size=length), 254).astype(numpy.uint16)
        builder.add_document(document, [document.size])
    builder.finalize(f"{prefix}.idx")
    return ("--data-path", str(prefix))


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
        forks.train(folder, ranks=1, args=[*job(model), *saving])
        return folder / "weights"

    @functools.cache
    def reference(
        model: tuple[str, ...], iterations: int = 10, ranks: int = 1, entry: str = ENTRY
    ) -> tuple[Path, TrainingLog]:
        start = weights(model)
        words: list[str | Path] = [*job(model)]
        words += ["--train-iters", str(iterations), "--log-interval", "1", "--load", start, "--finetune"]
        folder = tmp_path_factory.mktemp("reference")
        return start, forks.train(folder, ranks=ranks, args=words, entry=entry)

    return reference
