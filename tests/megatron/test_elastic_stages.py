"""Jobs whose stages have layers of their own outlive their nodes, by plans of other cuts."""

from __future__ import annotations

import os
import random
import re
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from megatron_hexi.plan import Plan, plan_from_yaml
from megatron_hexi.yaml_file import yaml_from_text
from tests.megatron.conftest import job as job_words
from tests.megatron.elastic import ElasticJob
from tests.megatron.launch import REPOSITORY
from tests.megatron.option_cases import FURTHER_TOKENS, WINDOW
from tests.megatron.test_elastic import check_losses, more_lines, said_more, words
from tests.megatron.test_stages_experts import BIAS, Z_LOSS, balanced
from tests.megatron.test_stages_experts import MODEL as EXPERTS
from tests.megatron.test_stages_states import CONVOLUTION, GROUP_BEHIND_UNIT, MAMBA_PATTERN
from tests.megatron.test_stages_states import GPT as DELTA_NETS
from tests.megatron.test_stages_training import DENSE_HEADER
from tests.megatron.test_stages_training import MODEL as IN_SIX
from tests.megatron.test_uneven_training import MODEL
from tests.support.expert_layouts import HEADER

FOUR_LAYERS = (*MODEL, "--num-layers", "4")
#: So slow that stages are better than a sequence on two nodes.
SLOW_LINK = "bandwidth_gb_s: 0.0005, latency_us: 200, per: node"
HEAD = """version: 2
workload: {seq_length: 127, heads: 6, kv_heads: 2, head_dim: 16, layers: 4}
job: {micro_batch_size: 2}
replicas:
- stages:
"""
#: Two stages of unequal layers and tensor-parallel sizes: a node of two ranks, and one of one.
TWO_STAGES = """
  - {layers: [0, 3], domains: [{ranks: [0, 1]}]}
  - {layers: [3, 4], domains: [{ranks: [2]}]}
"""


MINISTAGES = """
  - {layers: [0, 2], ministages: 2, domains: [{ranks: [0], samples: 1}, {ranks: [1], samples: 1}]}
  - {layers: [2, 4], ministages: 2, domains: [{ranks: [2]}]}
"""
#: Each token goes to all experts. Where it goes to two, rounding decides a tie every few dozen iterations
#: (`test_a_token_goes_elsewhere_only_where_its_experts_tie`), and from there on it is another training.
ALL_CHOSEN = ("--moe-router-topk", "8")
WITH_EXPERTS = """
  - layers: [0, 4]
    domains:
    - {ranks: [0, 1], samples: 3, experts: [3, 8]}
    - {ranks: [2], samples: 1, experts: [0, 3]}
  - {layers: [4, 6], domains: [{ranks: [3]}]}
"""


def staged(text: str, head: str = HEAD) -> Plan:
    return plan_from_yaml(yaml_from_text(Path("plan.yaml"), head + text))


def test_two_stages_go_on_by_a_plan_of_other_stages(forks, tmp_path):
    """The GPUs that are left share all layers, with memory for less than a replica each."""
    plan = staged(TWO_STAGES)
    ranks = {"duo": 2, "n1": 1}
    args = words(tmp_path, plan, {"duo": 1.0, "n1": 1.0}, 40, 100, ranks, FOUR_LAYERS, 1.5094)
    launcher = ("--copy-interval", "1", "--script", str(REPOSITORY / "tests/megatron/late_imports.py"))
    with ElasticJob(tmp_path, "1:2", args, ranks, launcher) as job:
        job.start(*ranks)
        job.wait(lambda: job.safe_copy() > 5)
        job.kill("n1")
        assert job.wait_for_end() == {"duo": 0}
        [first, second] = job.rounds()
        assert "3 ranks on" in first
        assert "2 ranks on duo; without n1-0" in second
        assert re.search(r"goes on from iteration \d+ in memory", second)
        assert job.told("replicas of 1 stages on 2 ranks"), job.said("duo")[-4000:]
        assert not re.findall("late import: .*", job.said())
        check_losses(job, forks, tmp_path, plan, 40, FOUR_LAYERS)


@dataclass(frozen=True)
class Lasting:
    """A job that loses nodes and ranks.

    Args:
        stages: of its own plan.
        usable_gib: memory of a GPU.
        model: Megatron's arguments of the model.
        head: of the plan.
    """

    stages: str
    usable_gib: float
    model: tuple[str, ...] = FOUR_LAYERS
    head: str = HEAD


LASTING = {
    # What is left of them needs two stages, or a unit of two ranks.
    "stages": Lasting(TWO_STAGES, 1.5082),
    "ministages": Lasting(MINISTAGES, 1.5105),
    "windows": Lasting(TWO_STAGES, 1.5082, (*FOUR_LAYERS, *WINDOW, "--window-attn-skip-freq", "2")),
    "experts": Lasting(
        WITH_EXPERTS,
        3.5,
        tuple(
            job_words((*EXPERTS, *balanced("aux_loss"), *Z_LOSS, *BIAS, *ALL_CHOSEN, "--sequence-parallel"))
        ),
        f"{HEADER}- stages:\n",
    ),
    "prediction": Lasting(TWO_STAGES, 3.5, (*FOUR_LAYERS, *FURTHER_TOKENS)),
    "mamba": Lasting(GROUP_BEHIND_UNIT, 3.5, tuple(job_words((*IN_SIX, *MAMBA_PATTERN))), DENSE_HEADER),
    "convolution": Lasting(GROUP_BEHIND_UNIT, 3.5, tuple(job_words((*IN_SIX, *CONVOLUTION))), DENSE_HEADER),
    "delta": Lasting(GROUP_BEHIND_UNIT, 3.5, tuple(job_words((*IN_SIX, *DELTA_NETS))), DENSE_HEADER),
}
NODES = {"duo": 2, "n1": 1, "n2": 1}
GRIEFS = ("node", "node", "node", "node", "rank", "rank")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", LASTING)
def test_six_losses_in_a_row_in_stages(name, forks, tmp_path):
    """Each node that is lost comes back: its job goes on by one plan without it, and by its own with it."""
    case, chance = LASTING[name], random.Random(name)
    plan = staged(case.stages, case.head)
    speeds = {"duo": 1.0, "n1": 1.0, "n2": 0.5}
    # So few iterations that the data are one epoch, whose order does not depend on their number.
    args = words(tmp_path, plan, speeds, 20_000, 8, NODES, case.model, case.usable_gib, SLOW_LINK)
    launcher = ("--copy-interval", "2", "--script", str(REPOSITORY / "tests/megatron/paced.py"))
    with ElasticJob(tmp_path, "1:3", args, NODES, launcher) as job:
        job.start(*NODES)
        # Before anything is saved a loss begins anew, with weights that are drawn by another plan.
        job.wait(lambda: job.safe_copy() > 0, 600)
        victims = ["duo", "n1", *chance.choices(("duo", "n1"), k=2)]
        for grief in chance.sample(GRIEFS, len(GRIEFS)):
            job.wait(partial(more_lines, job, job.lines() + chance.randrange(3, 8)), 600)
            before = len(job.told("has finished"))
            if grief == "rank":
                os.kill(job.rank(chance.choice(("duo", "n1"))).pid, signal.SIGKILL)
            else:
                job.kill(victim := victims.pop())
            took = job.wait(partial(said_more, job, before), 600)
            print(f"{grief}: next iteration {took:.1f} s after it; load {os.getloadavg()[0]:.0f}")
            if grief == "node":
                job.wait(partial(more_lines, job, job.lines() + 2))
                job.start(victim)
                job.wait(lambda: f"{plan.ranks} ranks" in job.rounds()[-1], 600)
        job.wait(partial(more_lines, job, job.lines() + 3))
        last = max(i for i, _ in job.losses())
        print("\n".join([*job.rounds(), *job.told("hexi: plan ")]))
    check_losses(job, forks, tmp_path, plan, last, case.model)
