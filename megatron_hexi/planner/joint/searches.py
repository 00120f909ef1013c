"""The joint searches of one planning: over sizes of micro-batches, and for GPUs with more memory.

The time of a layer depends neither on memory nor on the batch. So searches of the same micro-batches on
the same GPUs share the layers that were timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.models import Job
from megatron_hexi.plan.recompute import of_layer
from megatron_hexi.planner.expert_placement import ExpertRule
from megatron_hexi.planner.features import is_allowed
from megatron_hexi.planner.joint.joint_search import JointSearch
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.stage_times import KnownStages
from megatron_hexi.planner.layouts.trial import Candidate, Progress
from megatron_hexi.planner.recomputation import offered
from megatron_hexi.planner.request import Request


class JointSearches:
    """Runs joint searches, which share their timed layers.

    Args:
        progress: callback, receives (phase, done, total).
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._timers: dict[tuple[int, Job, tuple[int, ...], ExpertRule], LayerTimer] = {}
        self._known: dict[tuple[int, Job, tuple[int, ...]], KnownStages] = {}
        self._assembled = 0

    @property
    def trials(self) -> int:
        """Number of layouts that were timed."""
        return self._assembled + sum(timer.trials for timer in self._timers.values())

    def plans(
        self, request: Request, cluster: Cluster, memory: float, faster_than: float = math.inf
    ) -> list[Candidate]:
        """Return plans that fit, over all micro-batch sizes.

        Args:
            memory: factor of the GPUs' memory that plans may use.
            faster_than: seconds of an iteration; plans that are predicted to be slower are left out.
        """
        return list(self._fitting(request, cluster, memory, faster_than, fewest=False))

    def with_few_replicas(self, request: Request, cluster: Cluster, memory: float) -> Candidate | None:
        """Return the first plan found that fits, with as few replicas as possible; ``None``: none fits."""
        return next(self._fitting(request, cluster, memory, math.inf, fewest=True), None)

    def _fitting(
        self, request: Request, cluster: Cluster, memory: float, faster_than: float, *, fewest: bool
    ) -> Iterator[Candidate]:
        for size in request.micro_batch_sizes():
            search = JointSearch(request, self._timer(request, cluster, size), memory)
            for candidate in search.run(self._progress, faster_than, fewest=fewest):
                if candidate.fits and is_allowed(candidate.plan, candidate.job, request):
                    faster_than = min(faster_than, candidate.iteration_s)
                    yield candidate
            self._assembled += search.trials

    def _timer(self, request: Request, cluster: Cluster, micro_batch_size: int) -> LayerTimer:
        widths = tuple(request.widths(max(len(node.ranks) for node in cluster.nodes)))
        # Recomputation of core attention is timed as a pass of its own; all modes follow from one trial.
        job = replace(
            request.job,
            tensor_parallel=widths[0],
            pipeline_parallel=1,  # the search joins stages to pipelines
            data_parallel=1,
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size,
            recompute="selective",
        )
        alike = id(cluster), job, widths  # a timer keeps the cluster, and so its id
        key = *alike, request.experts
        if key not in self._timers:
            known = self._known.setdefault(alike, KnownStages())
            modes = tuple(dict.fromkeys(("none", *map(of_layer, offered(request, request.job)), "full")))
            self._timers[key] = LayerTimer(job, cluster, widths, request.experts, modes, known)
        return self._timers[key]
