"""HexiScale's planner (arXiv 2409.01143), our reading of the paper.

The scheduler that its authors published differs: docs/results/rivals.md.

Two levels of graph partitioning; vertices are GPUs, weighed by their memory:

    pipelines   parts of about equal weight with the least cut of 1 / bandwidth: gradients, which pipelines
                exchange, get the fast links. Also the least cut of bandwidth, which its refinement tries
    stages      a pipeline's parts with the least cut of bandwidth are the machines, since tensor parallelism
                stays inside one; each machine's GPUs are cut into tensor-parallel groups of powers of two
    order       a path through the machines over the thickest links
    layers      in proportion to a stage's memory, or to its speed
    batch       by the seconds that each pipeline takes

Their search is a random walk over the number of pipelines, with METIS for each partition. Here a few numbers
of pipelines are tried, with the swaps of Kernighan and Lin (1970), so that the result is always the same; the
widest tensor-parallel group is one number for all machines. The cost model is ours, and chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.rivals.readings.gpu_links import bandwidths, thickest_path
from benchmarks.rivals.readings.staged import Pipeline, StageChoice, StagedJudge
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.planner.joint import Candidate

#: Numbers of pipelines that are tried.
_PIPELINES = (1, 2, 4, 8)
#: The most swaps of two GPUs.
_SWAPS = 200
#: Tolerance for rounding in a cut, as a part of the heaviest edge.
_ROUNDING = 1e-9


def hexiscale(judge: StagedJudge) -> Candidate | None:
    """Return HexiScale's best layout by the cost model, preferably one that fits; ``None`` if none is."""
    size = judge.request.micro_batch_sizes()[0]
    return judge.best((pipelines, size) for pipelines in _choices(judge))


def partition(edges: Floats, weights: Floats, parts: int) -> Ints:
    """Return the part of each vertex, for parts of about equal weight with little cut between them, [N].

    Starts from runs of the vertices, and swaps two of different parts as long as that makes the cut less and
    parts no more unequal: Kernighan and Lin's step, the best swap of all first.

    Args:
        edges: weight of the edge between two vertices; symmetric, 0 on the diagonal, [N, N].
        weights: weight of each vertex, [N].
        parts: number of parts.
    """
    count = len(weights)
    ends = np.cumsum(weights) - weights / 2
    part = np.minimum((ends / weights.sum() * parts).astype(int), parts - 1)
    if len(np.unique(part)) < parts:
        part = np.arange(count) * parts // count
    for _ in range(_SWAPS if parts > 1 else 0):
        to_part = edges @ np.eye(parts)[part]  # weight from each vertex to each part
        gain = to_part[:, part] - to_part[np.arange(count), part][:, None]
        saved = gain + gain.T - 2 * edges
        heavy = np.bincount(part, weights, parts)
        apart = heavy[part][:, None] - heavy[part]
        moved = weights[:, None] - weights
        worse = np.abs(apart - 2 * moved) > np.maximum(np.abs(apart), weights.max()) + _ROUNDING
        saved[(part[:, None] == part) | worse] = -np.inf
        first, second = np.unravel_index(int(np.argmax(saved)), saved.shape)
        if saved[first, second] <= _ROUNDING * edges.max():
            break
        part[first], part[second] = part[second], part[first]
    return part


def _choices(judge: StagedJudge) -> Iterator[tuple[Pipeline, ...]]:
    """Yield sets of pipelines for the cost model to compare."""
    request, links = judge.request, bandwidths(judge.cluster)
    order = np.array(judge.order)
    weights, ordered = np.array(judge.memory)[order], links[np.ix_(order, order)]
    slow = np.divide(1.0, ordered, out=np.zeros_like(ordered), where=ordered > 0)
    numbers = [request.job.data_parallel] if "data_parallel" in request.fixed else list(_PIPELINES)
    widest = max(len(node.ranks) for node in judge.cluster.nodes)
    seen: set[tuple[Pipeline, ...]] = set()
    for number in numbers:
        if number > min(len(weights), request.job.global_batch_size):
            continue
        for edges in (slow, ordered) if number > 1 else (ordered,):
            part = partition(edges, weights, number)
            members = [order[part == pipeline].tolist() for pipeline in range(number)]
            for width in request.widths(widest):
                for of in (judge.memory, judge.speeds):
                    only = "tensor_parallel" in request.fixed
                    pipelines = tuple(_pipeline(judge, gpus, links, width, of, only) for gpus in members)
                    if all(map(len, pipelines)) and pipelines not in seen and _may_be(judge, pipelines):
                        seen.add(pipelines)
                        yield pipelines


def _may_be(judge: StagedJudge, pipelines: Sequence[Pipeline]) -> bool:
    request = judge.request
    depths = {len(pipeline) for pipeline in pipelines}
    return "pipeline_parallel" not in request.fixed or depths == {request.job.pipeline_parallel}


def _pipeline(
    judge: StagedJudge, gpus: Sequence[int], links: Floats, width: int, of: Sequence[float], only: bool
) -> Pipeline:
    """Return a pipeline of tensor-parallel groups, machine by machine.

    Args:
        judge: the judge for the request.
        gpus: GPUs of the pipeline.
        links: bytes/s between all GPUs, [N, N].
        width: the most GPUs of a tensor-parallel group.
        of: number to which layers are in proportion, for each GPU.
        only: whether groups must have exactly `width` GPUs.
    """
    machines: dict[int, list[int]] = {}
    for gpu in gpus:
        machines.setdefault(judge.cluster.ranks[gpu].node, []).append(gpu)
    size = judge.request.micro_batch_sizes()[0]
    allowed = judge.request.widths(width)
    stages = []
    for own in thickest_path(list(machines.values()), links):
        while own and (len(own) >= width or not only):
            take = max(one for one in allowed if one <= min(width, len(own)))
            unit, own = tuple(own[:take]), own[take:]
            stages.append(StageChoice((unit,), sum(of[gpu] for gpu in unit), (size,)))
    return tuple(stages)
