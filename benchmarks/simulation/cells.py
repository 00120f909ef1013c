"""The suite: what is planned on which cluster. One cell is one plan."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.simulation.random_clusters import FOLDER, names
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.models import Job, read_model

TESTBEDS = ("testbed-8", "testbed-12", "testbed-16")
SIMULATIONS = ("sim-32", "sim-64", "sim-128")
#: Mixed and homogeneous side of each pair.
PAIRS = (("flops-1-mixed", "flops-1-equal"), ("flops-2-mixed", "flops-2-equal"))
TESTBED_MODELS = ("gpt-3b", "gpt-7b", "gpt-13b")
SIMULATION_MODELS = ("gpt-13b", "gpt-70b")
#: Of the testbeds with FlashAttention-2 on every GPU, and of the random clusters.
KERNEL_MODEL, RANDOM_MODEL = "gpt-7b", "gpt-3b"
TESTBED_CONTEXTS = tuple(2**power for power in range(14, 19))
SIMULATION_CONTEXTS = tuple(2**power for power in range(17, 21))
RANDOM_CONTEXTS = (2**15, 2**18)


@dataclass(frozen=True)
class Cell:
    """One plan of the suite.

    Args:
        suite: ``testbed``, ``simulation``, ``kernel``, ``flops`` or ``random``.
        cluster: name of a file in clusters/.
        model: a preset.
        seq_length: context.
        data_parallel: replicas; ``None``: as many as are best, for the plan and for the baselines.
        kernel: attention kernel of every GPU; ``None``: each GPU's fastest.
        beside: other clusters that must be given the same tensor- and pipeline-parallel size.
        unit: these two sizes; ``None``: found by the rule in units.py.
    """

    suite: str
    cluster: str
    model: str
    seq_length: int
    data_parallel: int | None = 1
    kernel: str | None = None
    beside: tuple[str, ...] = ()
    unit: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """What ``--only`` matches, and results are kept under."""
        replicas = "auto" if self.data_parallel is None else f"dp{self.data_parallel}"
        return f"{self.suite}/{self.cluster}/{self.model}/{spell_length(self.seq_length)}/{replicas}"

    @property
    def job(self) -> Job:
        """Its job, tensor- and pipeline-parallel size aside."""
        return Job(read_model(self.model), self.seq_length, recompute="full", kernel=self.kernel)


@functools.cache
def load_cluster(name: str) -> Cluster:
    """A cluster of the suite, read once."""
    return read_cluster(FOLDER / f"{name}.yaml")


def spell_length(tokens: int) -> str:
    """``64K``, ``1M``."""
    return f"{tokens >> 20}M" if tokens % 2**20 == 0 else f"{tokens >> 10}K"


def suite() -> tuple[Cell, ...]:
    """All cells, in the order of the page."""
    return tuple(_cells())


def _cells() -> Iterator[Cell]:
    for replicas in (1, None):
        for cluster in TESTBEDS:
            for model in TESTBED_MODELS:
                for length in TESTBED_CONTEXTS:
                    yield Cell("testbed", cluster, model, length, replicas)
        for cluster in SIMULATIONS:
            for model in SIMULATION_MODELS:
                for length in SIMULATION_CONTEXTS:
                    yield Cell("simulation", cluster, model, length, replicas)
    for cluster in TESTBEDS:
        for length in TESTBED_CONTEXTS:
            yield Cell("kernel", cluster, KERNEL_MODEL, length, kernel="flash-attn-2")
    for pair in PAIRS:
        for model in SIMULATION_MODELS:
            for length in SIMULATION_CONTEXTS:
                for cluster in pair:
                    yield Cell("flops", cluster, model, length, beside=pair)
    for cluster in names():
        for length in RANDOM_CONTEXTS:
            yield Cell("random", cluster, RANDOM_MODEL, length, unit=(1, 1))
