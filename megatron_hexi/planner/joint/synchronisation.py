"""Seconds that gradients, weights and the optimizer step add to an iteration, before GPUs are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from megatron_hexi.cost.arrays import Ints
from megatron_hexi.cost.compute import device_speeds, optimizer_seconds
from megatron_hexi.cost.memory import fp8_params, owned_params, part_params
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.once import exposed_seconds
from megatron_hexi.cost.reductions import weight_collectives
from megatron_hexi.cost.rings import Rings
from megatron_hexi.planner.joint.pipes import PipeStage
from megatron_hexi.planner.joint.pools import StageShape
from megatron_hexi.planner.joint.stage_times import LayerTimes

if TYPE_CHECKING:  # which has one of these
    from megatron_hexi.planner.joint.layer_times import LayerTimer


class Synchronisation:
    """Times the synchronisation of replicas, on the first GPUs that have a stage's shape.

    Args:
        timer: the timer of layers, which knows the cluster and its pools.
    """

    def __init__(self, timer: LayerTimer) -> None:
        self._timer, self._pools = timer, timer.pools
        self._rings = Rings(LinkTable(timer.cluster))
        #: Precision and overlap are those of the job, whatever the tensor-parallel size.
        self._collectives = weight_collectives(timer.job(timer.widths[0]))
        self._stage = cache(self._stage_seconds)
        self._gpus_of = cache(self._ring_gpus)

    def seconds(self, stages: Sequence[PipeStage], shards: int) -> float:
        """Return the exposed seconds of gradients, weights and the optimizer's step, on the slowest stage."""
        last = len(stages) - 1
        # Embeddings that both ends of a pipeline hold are summed between them.
        ends = {0: stages[last].shape, last: stages[0].shape} if last else {}
        return max(
            self._stage(stage.shape, stage.layers, place == 0, place == last, shards, ends.get(place))
            for place, stage in enumerate(stages)
        )

    def _layer(self, shape: StageShape) -> LayerTimes:
        """Return the times of a layer on a stage of a pipeline that was found."""
        layer = self._timer.layer(shape, False)
        assert layer is not None, "the stage is part of a pipeline that was found"
        return layer

    def _stage_seconds(
        self,
        shape: StageShape,
        layers: int,
        is_first: bool,
        is_last: bool,
        shards: int,
        end: StageShape | None,
    ) -> float:
        """Return the exposed seconds of a stage's gradients and weights, and of the optimizer's step."""
        job, part = self._timer.job(shape.width), ModelPart(layers, 0, is_first, is_last, 1)
        params = int(part_params(job, part, trained=True))
        shared = job.model.vocab_params(shape.width) if end and job.model.shares_embedding else 0
        owned = float(owned_params(job, params, shape.units * shards))
        speeds = (device_speeds(self._pools.pools[kind].device, job) for kind in shape.kinds)
        copied = float(np.asarray(fp8_params(job, part)))
        shown = max(optimizer_seconds(each, job, params, owned, copied) for each in speeds)
        collectives = []
        for one in self._collectives:
            seconds = self._ring(shape, shards, float((params - shared) * one.element_bytes))
            if end and shared:
                seconds += self._ring(shape, shards, float(shared * one.element_bytes), end)
            collectives.append((seconds, one.hides_behind))
        return shown + float(exposed_seconds(collectives, layers, self._layer(shape).cover))

    def _ring(self, shape: StageShape, shards: int, size: float, end: StageShape | None = None) -> float:
        """Return the seconds of one ring pass over a stage's units in all replicas, and those of `end`."""
        units = (shape.units + (0 if end is None else end.units)) * shards
        return self._rings.seconds(self._gpus_of(shape, shards, end), size, shape.width, 1 / units)

    def _ring_gpus(self, shape: StageShape, shards: int, end: StageShape | None) -> Ints:
        """Return the first GPU of each unit of a ring: of a stage in all replicas, and of `end`, if any."""
        gpus = self._pools.some_gpus(shape)
        if end is not None and shape.kinds != end.kinds:
            gpus = gpus + self._pools.some_gpus(end)
        elif end is not None or shards > 1:
            gpus = self._with_others(gpus, shards if end is None else 2 * shards)
        return np.array(gpus[:: shape.width])

    def _with_others(self, gpus: Sequence[int], shards: int) -> list[int]:
        """Return a stage's GPUs with some of those of other replicas that hold the same weights."""
        cluster = self._pools.cluster
        parts = Counter(cluster.ranks[gpu].node for gpu in gpus)
        together: list[int] = []
        beside = 0
        for node, part in parts.items():
            ranks = cluster.nodes[node].ranks
            beside = part * min(shards, len(ranks) // part)
            together += ranks[:beside]
        for pool in self._pools.pools:
            for node in pool.nodes:
                if node not in parts and pool.size >= beside:
                    return together + list(cluster.nodes[node].ranks[:beside])
        return together
