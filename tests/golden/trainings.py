"""Losses and gradient norms of small trainings on the CPU, each under a plan of another kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_hexi.plan import Plan, proportional_plan
from tests.golden.values import plain
from tests.megatron import test_stages_training as stages
from tests.megatron import test_unequal_replicas as unequal
from tests.megatron.conftest import job, write_documents
from tests.megatron.forked import Forks
from tests.megatron.option_cases import CASES as OPTIONS
from tests.megatron.option_cases import OVERLAPPED
from tests.megatron.test_uneven_training import EXACT, THREE_AND_ONE, WORKLOAD
from tests.support.stage_layouts import FOUR_LAYERS, stage_layout

ITERATIONS = 3


@dataclass(frozen=True)
class Case:
    """A training: how many ranks, under which plan, with which arguments beside those of `job`."""

    ranks: int
    plan: Plan
    words: tuple[str, ...] = ()


def cases() -> Iterator[tuple[str, Case]]:
    """By the kind of plan."""
    yield "equal", Case(4, proportional_plan(WORKLOAD, [[[1, 1], [1, 1]]]))
    yield "uneven", Case(4, THREE_AND_ONE)
    yield "uneven bf16", Case(4, THREE_AND_ONE, ("--bf16",))
    for name in ("dp2-cp2-distributed-optimizer", "tp2-cp2-sequence-parallel", "pp2-cp2-full-recompute"):
        yield name, Case(*EXACT[name])
    yield (
        "unequal replicas",
        Case(4, unequal.plan_of("three-and-one"), (*unequal.BATCH, *OVERLAPPED)),
    )
    with TemporaryDirectory() as folder:
        for name in ("tensor-parallel-sizes", "samples", "tensor-parallel-domain"):
            case = stages.CASES[name]
            plan = case.plan(Path(folder))
            yield f"stages {name}", Case(plan.ranks, plan, (*stages.MODEL, *case.model, *case.job))
        for name in ("ministages", "offload", "dealt"):
            plan = stage_layout(name, Path(folder))
            yield name, Case(plan.ranks, plan, FOUR_LAYERS)
        corpus = write_documents(Path(folder))
        for name in ("documents", "documents-dealt", "experts"):
            option = OPTIONS[name]
            plan = option.plans()["groups"]
            data = corpus if option.corpus else ()
            yield name, Case(plan.units, plan, (*option.model, *data, *option.job))


def values(case: Case, forks: Forks) -> dict[str, Any]:
    """Losses and gradient norms of the first iterations, at full precision."""
    words = [*job(case.words), "--train-iters", str(ITERATIONS), "--log-interval", "1"]
    with TemporaryDirectory() as folder:
        log = forks.train(Path(folder), ranks=case.ranks, args=words, plan=case.plan)
    return {"losses": plain(log.losses), "gradient norms": plain(log.grad_norms)}
