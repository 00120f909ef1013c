"""Zorse's planner (arXiv 2507.10392), our reading of the paper.

The planner that its authors published differs: docs/results/rivals.md.

    groups    a minimum k-cut of the machines by bandwidth, for each number k of groups: traffic inside a
              group, which is heavy, gets the fast links. A group is a stage, whatever kinds of GPU it has
    layers    in proportion to the speed of a group's GPUs together
    samples   each GPU of a stage takes samples of every micro-batch in proportion to its speed
    order     a path through the groups over the thickest links

The cut is found by contraction, as Karger's (1993), of the heaviest edge instead of a random one: the two
groups with the most bandwidth between two of their GPUs become one; where links are alike, those that differ
least in the speed of their GPUs, then the slowest.

Not here: ministages, offloading, and parameters sharded inside a stage (ZeRO-3). So a GPU holds its stage's
weights and gradients whole, and only a share of the optimizer's state: where memory decides, Zorse itself can
do more than this. A stage has no more GPUs than a micro-batch has samples: of a larger group the slowest GPUs
have nothing to do. There is neither tensor nor context parallelism.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.rivals.readings.gpu_links import bandwidths, thickest_path
from benchmarks.rivals.readings.staged import Pipeline, StageChoice, StagedJudge
from megatron_hexi.plan.layout import apportion
from megatron_hexi.planner.joint import Candidate

#: The most groups.
_MOST_GROUPS = 16


def zorse(judge: StagedJudge) -> Candidate | None:
    """Return Zorse's best layout by the cost model, preferably one that fits; ``None`` if none is found."""
    fixed, job = judge.request.fixed, judge.request.job
    if {"tensor_parallel", "data_parallel"} & fixed and (job.tensor_parallel, job.data_parallel) != (1, 1):
        return None
    return judge.best(
        ((_pipeline(judge, groups, size),), size)
        for groups in k_cuts(judge)
        if "pipeline_parallel" not in fixed or len(groups) == job.pipeline_parallel
        for size in _sizes(judge, groups)
    )


def k_cuts(judge: StagedJudge) -> Iterator[list[list[int]]]:
    """Yield groups of GPUs along their path, for each number of groups in descending order."""
    cluster, links = judge.cluster, bandwidths(judge.cluster)
    machines: dict[int, list[int]] = {}
    for gpu in judge.order:
        machines.setdefault(cluster.ranks[gpu].node, []).append(gpu)
    groups = list(machines.values())
    while True:
        if len(groups) <= _MOST_GROUPS:
            yield thickest_path(groups, links)
        if len(groups) == 1:
            return

        def closeness(pair: tuple[int, int]) -> tuple[float, float, float]:
            first_group, second_group = groups[pair[0]], groups[pair[1]]
            speeds = [np.mean([judge.speeds[gpu] for gpu in group]) for group in (first_group, second_group)]
            together = sum(judge.speeds[gpu] for gpu in first_group + second_group)
            return (
                float(links[np.ix_(first_group, second_group)].mean()),
                -abs(float(speeds[0] - speeds[1])),
                -together,
            )

        first, second = max(itertools.combinations(range(len(groups)), 2), key=closeness)
        groups[first] = groups[first] + groups.pop(second)


def _sizes(judge: StagedJudge, groups: Sequence[list[int]]) -> list[int]:
    """Return micro-batch sizes: powers of two that divide the batch, at least a sample per GPU of a stage."""
    request = judge.request
    if "micro_batch_size" in request.fixed:
        return [request.job.micro_batch_size]
    batch, widest = request.job.global_batch_size, max(map(len, groups))
    sizes = [size for size in (2**power for power in range(batch.bit_length())) if batch % size == 0]
    enough = [size for size in sizes if size >= widest]
    return enough[:2] or sizes[-1:]


def _pipeline(judge: StagedJudge, groups: Sequence[list[int]], size: int) -> Pipeline:
    """Return a pipeline with a stage for each group, samples assigned by speed."""
    stages = []
    place = {gpu: number for number, gpu in enumerate(judge.order)}
    for group in groups:
        fastest = sorted(group, key=lambda gpu: (-judge.speeds[gpu], place[gpu]))
        chosen = sorted(fastest[:size], key=place.__getitem__)
        speeds = [judge.speeds[gpu] for gpu in chosen]
        more = apportion(size - len(chosen), speeds) if size > len(chosen) else [0] * len(chosen)
        # In addition to one sample for each GPU, so that none is without.
        ideal = apportion(size, speeds)
        samples = ideal if min(ideal) else [1 + count for count in more]
        stages.append(StageChoice(tuple((gpu,) for gpu in chosen), sum(speeds), tuple(samples)))
    return tuple(stages)
