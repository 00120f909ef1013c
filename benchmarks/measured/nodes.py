"""Layouts of experts over two nodes: rows are sent to each of a token's experts, or once to each node."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.measured.layouts import Layout
from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.models.job import job_terms
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage, validate_plan

if TYPE_CHECKING:
    from benchmarks.measured.scenarios import Scenario


def node_layouts(scenario: Scenario, cluster: Cluster) -> list[Layout]:
    """Return one stage of all GPUs, each with as many samples and experts, by both ways of its rows.

    Args:
        scenario: the job.
        cluster: as it was probed.
    """
    job, ranks = scenario.job, range(len(cluster.ranks))
    length, experts = job.seq_length, scenario.experts // len(ranks)
    members = [
        Member((rank,), length, (0, job.model.heads), experts=((rank * experts, (rank + 1) * experts),))
        for rank in ranks
    ]
    domains = tuple(
        Domain((Group(((0, length),), (member,)),), samples=job.micro_batch_size // len(ranks))
        for member in members
    )
    nodes = tuple(tuple(node.ranks) for node in cluster.nodes)
    found = []
    for name, beside, ends in (("direct", "", None), ("by node", "direct", nodes)):
        stage = Stage(domains, layers=(0, job.model.layers), expert_nodes=ends)
        workload = replace(job.workload(), experts=scenario.experts)
        plan = Plan(workload, (Replica((stage,), job.global_batch_size // job.micro_batch_size),))
        plan = replace(plan, job=job_terms({"micro_batch_size": job.micro_batch_size}, plan))
        validate_plan(plan)
        seconds = CostModel(job, cluster).estimate(plan, tuple(ranks)).iteration_s
        text = f"{experts} experts on each of {len(ranks)} units"
        found.append(Layout(name, plan, job, tuple(ranks), text, False, seconds, beside))
    return found
