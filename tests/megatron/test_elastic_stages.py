"""Jobs whose stages have layers of their own outlive their nodes, by plans of other cuts."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_hexi.plan import Plan, plan_from_yaml
from megatron_hexi.yaml_file import yaml_from_text
from tests.megatron.elastic import ElasticJob
from tests.megatron.test_elastic import check_losses, words
from tests.megatron.test_uneven_training import MODEL

FOUR_LAYERS = (*MODEL, "--num-layers", "4")
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


def staged(text: str, head: str = HEAD) -> Plan:
    return plan_from_yaml(yaml_from_text(Path("plan.yaml"), head + text))


def test_two_stages_go_on_by_a_plan_of_other_stages(forks, tmp_path):
    """Those that are left share samples: one GPU has no memory for all layers at once."""
    plan = staged(TWO_STAGES)
    ranks = {"duo": 2, "n1": 1}
    args = words(tmp_path, plan, {"duo": 1.0, "n1": 1.0}, 40, 100, ranks, FOUR_LAYERS, 1.5105)
    with ElasticJob(tmp_path, "1:2", args, ranks, ("--copy-interval", "1")) as job:
        job.start(*ranks)
        job.wait(lambda: job.safe_copy() > 5)
        job.kill("n1")
        assert job.wait_for_end() == {"duo": 0}
        [first, second] = job.rounds()
        assert "3 ranks on" in first
        assert "2 ranks on duo; without n1-0" in second
        assert re.search(r"goes on from iteration \d+ in memory", second)
        assert job.told("replicas of 1 stages on 2 ranks"), job.said("duo")[-4000:]
        check_losses(job, forks, tmp_path, plan, 40, FOUR_LAYERS)
