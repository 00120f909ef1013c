"""What the planner finds trains as one rank does: plans of small jobs on mixed clusters, run for real."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_hexi.cluster import read_cluster
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import JobTerms, Plan, read_plan, write_plan
from megatron_hexi.planner import Request, find_plan
from tests.megatron.conftest import References, job
from tests.megatron.forked import Forks
from tests.megatron.option_cases import FURTHER_TOKENS, NORMED_LATENT, NORMED_LATENT_SPEC, SINKS, WINDOW
from tests.megatron.test_stages_states import CONVOLUTION
from tests.megatron.test_stages_training import MICRO_BATCH, MICRO_BATCHES, MODEL, words
from tests.megatron.test_uneven_training import SEQ_LENGTH, largest_difference

FAST, SLOW = "H100-SXM-80GB", "L40S-48GB"


@dataclass(frozen=True)
class Wanted:
    """A small planning problem.

    Attributes:
        fast: GPUs of the fast node.
        slow: of the slow one.
        fixed: terms of the job that are fixed.
        stages: of the plan's replicas, all together, at least.
        interleaved: whether ministages of the plan's stages are interleaved.
        model: arguments of the model.
        reference: arguments of the run on one rank alone.
        slow_test: whether it runs on request only.
    """

    fast: int
    slow: int
    fixed: dict[str, Any]
    stages: int = 1
    interleaved: bool = False
    model: tuple[str, ...] = ()
    reference: tuple[str, ...] = ()
    slow_test: bool = True

    @property
    def kinds(self) -> list[str]:
        """Kinds of the model's layers, none of a dense decoder's."""
        named = {
            "windows": WINDOW[0],
            "sinks": SINKS[0],
            "latent": NORMED_LATENT[0],
            "further": FURTHER_TOKENS[0],
            "convolution": CONVOLUTION[0],
        }
        return [name for name, flag in named.items() if flag in self.model]

    @property
    def name(self) -> str:
        fixed = "-".join(f"{name}={value}" for name, value in self.fixed.items())
        return f"{self.fast}+{self.slow}-{fixed or 'free'}" + "".join(f"-{name}" for name in self.kinds)


WANTED = [
    Wanted(2, 2, {}, slow_test=False),
    Wanted(2, 2, {"pipeline_parallel": 2}, 2),
    Wanted(2, 2, {"data_parallel": 2}, 2),
    Wanted(3, 1, {"pipeline_parallel": 2, "data_parallel": 1}, 2),
    Wanted(2, 4, {"pipeline_parallel": 3}, 3, interleaved=True),
    Wanted(
        *(2, 4, {"pipeline_parallel": 3}, 3),
        interleaved=True,
        model=(*WINDOW, "--window-attn-skip-freq", "2", *SINKS),
    ),
    Wanted(4, 2, {"tensor_parallel": 2, "pipeline_parallel": 2}, 2),
    Wanted(2, 4, {"tensor_parallel": 2, "data_parallel": 2}, 2),
    Wanted(5, 3, {"tensor_parallel": 2, "data_parallel": 1}, 3, interleaved=True),
    Wanted(2, 2, {"pipeline_parallel": 2, "recompute": "full"}, 2),
    Wanted(1, 3, {"pipeline_parallel": 2, "recompute": "selective"}, 2),
    Wanted(4, 4, {"pipeline_parallel": 2, "data_parallel": 2}, 4),
    Wanted(2, 2, {"pipeline_parallel": 2}, 2, model=(*WINDOW, "--window-attn-skip-freq", "2", *SINKS)),
    Wanted(2, 2, {}, 1, model=NORMED_LATENT, reference=NORMED_LATENT_SPEC),
    Wanted(1, 1, {"pipeline_parallel": 2}, 2, model=FURTHER_TOKENS, slow_test=False),
    Wanted(2, 1, {"pipeline_parallel": 2}, 2, interleaved=True, model=CONVOLUTION),
]


def planned(wanted: Wanted, folder: Path) -> Plan:
    """The plan, written and read as a user's would be."""
    nodes = [
        {"name": "fast", "gpu": FAST, "gpus": wanted.fast, "count": 1},
        {"name": "slow", "gpu": SLOW, "gpus": wanted.slow, "count": 1},
    ]
    network = {"bandwidth_gb_s": 5, "latency_us": 10, "per": "node"}
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump({"name": "small", "nodes": nodes, "network": network}))
    arguments = folder / "model.args"
    arguments.write_text(" ".join(job((*MODEL, *wanted.model))))
    terms = Job(
        model=read_model(str(arguments)),
        seq_length=SEQ_LENGTH,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * MICRO_BATCHES,
        precision="fp32",
    )
    request = Request(replace(terms, **wanted.fixed), frozenset({"micro_batch_size", *wanted.fixed}))
    found = find_plan(request, read_cluster(cluster)).plan
    write_plan(replace(found, job=JobTerms(micro_batch_size=MICRO_BATCH)), folder / "plan.yaml")
    return read_plan(folder / "plan.yaml")


@pytest.mark.parametrize(
    "wanted",
    [pytest.param(one, id=one.name, marks=[pytest.mark.slow] * one.slow_test) for one in WANTED],
)
def test_what_is_planned_trains_as_one_rank(
    wanted: Wanted, forks: Forks, references: References, tmp_path: Path
):
    plan = planned(wanted, tmp_path)
    assert sum(len(replica.stages) for replica in plan.replicas) >= wanted.stages
    assert any(replica.is_interleaved for replica in plan.replicas) is wanted.interleaved
    width = max(len(member.ranks) for member in plan.members)
    weights, reference = references((*MODEL, *wanted.model, *wanted.reference), 2)
    flags = ("--tensor-model-parallel-size", str(width)) if plan.is_repeated else ()
    log = forks.train(
        tmp_path, ranks=plan.ranks, args=words((*MODEL, *wanted.model), 2, weights, flags), plan=plan
    )
    assert largest_difference(log, reference) < 1e-5
