"""Time and memory of a layer on a stage, tables of a stage's time, and those that are known already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Counts, Floats, Ints
from megatron_hexi.cost.encoder_bytes import EncoderBytes, encoder_bytes, layers_again
from megatron_hexi.cost.memory import allocated_bytes
from megatron_hexi.cost.stage import StageCost
from megatron_hexi.mesh import Way
from megatron_hexi.models import Job
from megatron_hexi.plan.recompute import Recompute
from megatron_hexi.planner.joint.pipes import Pipe
from megatron_hexi.planner.layouts.trial import Trial

#: Memory of each pool's GPUs, and recomputation, if it is fixed.
type _Asked = tuple[tuple[float, ...], Recompute | None]


class FirstTimes(NamedTuple):
    """Seconds and bytes of a micro-batch's images on a first stage, or on several; 0 without images.

    Args:
        seconds: seconds of both passes, without recomputation; a number, or [S, 1, 1].
        again: seconds of computing one layer of the encoder again, likewise.
        kept: bytes of `EncoderBytes` on each pool, [4, pools], or [4, S, 1, pools, 1].
    """

    seconds: Counts
    again: Counts
    kept: Floats

    @classmethod
    def of(cls, stage: StageCost, job: Job, most: Callable[[Floats], Floats]) -> FirstTimes:
        """Return those of one stage.

        Args:
            job: the stage's job, without recomputation.
            most: the largest number on each pool, [pools], of numbers of units, [U].
        """
        images, found = stage.section.images, stage.encoding
        if found is None or images is None:
            return cls(0.0, 0.0, np.array(4 * [most(np.zeros(len(stage.section.units)))]))
        work, kept = found.work(0), encoder_bytes(job, images.of_units)
        seconds = float(sum(one.max() for one in work.passes) + np.add(*work.sent).max())
        again = float(found.layers.forward.sum(axis=0).max())
        return cls(seconds, again, np.array([most(allocated_bytes(part)) for part in kept]))

    def taken(
        self, job: Job, is_first: Ints, layers: Ints, again: Counts, in_flight: Ints
    ) -> tuple[Floats, Floats]:
        """Return the seconds and the bytes of stages, [S, P, L] and [S, P, pools, L]; 0 if not the first.

        Args:
            job: the job, with what is computed again.
            is_first: whether each is the first, [P, 1, 1].
            layers: numbers of the decoder's layers, [L].
            again: number of these that are computed again.
            in_flight: number of micro-batches under way, [P, 1, 1].
        """
        assert job.model.vision is not None
        repeated = layers_again(job, layers, again)
        kept = EncoderBytes(*self.kept).kept(job.model.vision.layers, np.expand_dims(repeated, -2), in_flight)
        return np.asarray(is_first[..., 0] * (self.seconds + repeated * self.again)), is_first * kept


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Times and memory of one layer of a micro-batch on a stage; arrays over the stage's pools.

    Args:
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        free_forward: seconds of the forward pass in which the network is free.
        free_backward: seconds of the backward pass in which the network is free.
        added: seconds that recomputation adds, by mode of recomputation (`LayerTimer.offered`).
        logits: seconds of the loss in both passes, with those of multi-token prediction.
        tokens: the most tokens of a unit of each pool.
        kept: bytes kept for a layer and micro-batch in flight, by mode of recomputation, [modes, pools].
        working: bytes of the layer that is computed, by mode of recomputation, [modes, pools].
        logits_bytes: bytes of the loss, and those that multi-token prediction keeps besides its layers.
        first: what a first stage does ahead of its layers.
        border_bytes: bytes of each border between stages.
        experts: the most routed experts on a GPU of each pool, in each layer that has experts.
        fp8_copies: bytes of fp8 copies of a weight of matrices on a GPU of each pool; 0: in bf16.
    """

    forward: float
    backward: float
    free_forward: float
    free_backward: float
    added: Floats
    logits: float
    units: Floats
    tokens: Floats
    kept: Floats
    working: Floats
    logits_bytes: Floats
    border_bytes: Floats
    experts: Floats
    fp8_copies: Floats
    expert_copies: int
    first: FirstTimes

    def slower(self, factor: float) -> LayerTimes:
        """Return this layer with its times multiplied by a factor."""
        times = ("forward", "backward", "free_forward", "free_backward", "added")
        return replace(self, **{name: getattr(self, name) * factor for name in times})

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward, without recomputation."""
        return self.forward + self.backward

    def cover(self, way: Way) -> float:
        """Return the seconds of a layer's pass that hide communication of gradients or weights."""
        return self.free_forward if way == "forward" else self.free_backward


class Table(NamedTuple):
    """Seconds and recomputation of a stage with 1 to L layers.

    Args:
        seconds: seconds of a micro-batch, forward and backward, [..., L]; never less for more layers; inf: no
            fit.
        modes: recomputation: an index into `offered`, or its length + k for k whole layers, [..., L].
        offered: what a stage may compute again in each layer.
    """

    seconds: Floats
    modes: Ints
    offered: tuple[Recompute, ...]

    def recompute(self, layers: int) -> Recompute:
        """Return the recomputation of a stage with this many layers."""
        mode = int(self.modes[layers - 1])
        return self.offered[mode] if mode < len(self.offered) else mode - len(self.offered)


@dataclass(frozen=True)
class KnownStages:
    """Results for stages of one job on one cluster, which all placements of experts share.

    Args:
        layers: layers, by the shape of their stage and the placement of experts on it.
        tables: tables of stages (`StageTables`), by the memory of each pool's GPUs and fixed recomputation,
            then by the stage.
        pipes: pipelines made of these tables (`PipelineSearch`), by the same, then by their stages.
        domains: the best domains of stages (`Assembly`), by the memory of each pool's GPUs, then by their
            stage.
    """

    layers: dict[tuple[object, ...], LayerTimes | None] = field(default_factory=dict)
    tables: dict[_Asked, dict[tuple[object, ...], Table | None]] = field(default_factory=dict)
    pipes: dict[_Asked, dict[tuple[object, ...], Pipe | None]] = field(default_factory=dict)
    domains: dict[tuple[float, ...], dict[tuple[object, ...], Trial]] = field(default_factory=dict)
