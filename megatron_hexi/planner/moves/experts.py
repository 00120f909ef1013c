"""Moves of rows of experts: once to each node, in the stages where that is faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.expert_messages import exchange_seconds
from megatron_hexi.cost.experts import expert_ranks
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.timing import Timing
from megatron_hexi.plan import Plan, Stage
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner.layouts.trial import Candidate
from megatron_hexi.planner.moves.climb import Move


class ExpertMoves:
    """Names the nodes of each stage whose rows of experts then travel faster (`Stage.expert_nodes`)."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._links = cluster, LinkTable(cluster)

    def __call__(self, candidate: Candidate) -> Iterator[Move]:
        """Yield the plan with nodes in these stages, and in no other; nothing if that is the plan itself."""
        plan, job = candidate.plan, candidate.job
        if job.model.experts is None or any(stage.layers is None for stage in plan.stages):
            return
        nodes, faster = self._nodes(plan), self._faster(candidate.timing)

        def named(stage: Stage) -> Stage:
            ranks = [rank for member in stage.members for rank in member.ranks]
            by_node: dict[int, list[int]] = {}
            for rank in ranks:
                by_node.setdefault(nodes[rank], []).append(rank)
            is_named = len(by_node) > 1 and not faster.isdisjoint(ranks)
            return replace(stage, expert_nodes=tuple(map(tuple, by_node.values())) if is_named else None)

        replicas = (replace(one, stages=tuple(map(named, one.stages))) for one in plan.replicas)
        changed = replace(plan, replicas=tuple(replicas))
        if changed != plan:
            yield Move((0.0, 0.0), changed, job)

    def _nodes(self, plan: Plan) -> list[int]:
        """Return the node of each rank."""
        gpus = rank_gpus(plan, len(self._cluster.ranks))
        return [self._cluster.ranks[gpu].node for gpu in gpus[: plan.ranks]]

    def _faster(self, timing: Timing) -> set[int]:
        """Return the ranks of expert domains whose all-to-alls are faster once to each node."""
        found = set[int]()
        for number in {section.number for section in timing.sections}:
            own = [place for place, section in enumerate(timing.sections) if section.number == number]
            sections = [timing.sections[place] for place in own]
            placed = [held for held in (timing.experts[place] for place in own) if held is not None]
            ranks, job = expert_ranks(sections, placed), sections[0].job
            direct, once = (
                exchange_seconds(job, replace(ranks, node=node), self._links)
                for node in (np.zeros_like(ranks.node), self._links.nodes[ranks.gpus])
            )
            numbers = np.concatenate([section.ranks.ravel() for section in sections])
            found.update(numbers[once < direct].tolist())
        return found
