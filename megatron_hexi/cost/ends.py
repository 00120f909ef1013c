"""Seconds of what stages do outside their layers: first ones encode images, last ones compute losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import tensor_parallel_seconds
from megatron_hexi.cost.compute import logits_times
from megatron_hexi.cost.fp8 import computed_rows
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.products import Times

if TYPE_CHECKING:
    from megatron_hexi.cost.sections import Section


class EndWork(NamedTuple):
    """Seconds of a micro-batch that units of a section work outside their layers, at one end of the model.

    Args:
        name: the work, as phases of the iteration and records of ranks name it.
        forward: seconds ahead of the layers' forward pass, [U].
        backward: seconds of the backward pass, to which all of the loss belongs, [U].
        sums: seconds of its collectives inside each unit, [U].
        sent: exposed seconds of its messages between units, forward and backward, [2][U].
    """

    name: Literal["encoder", "logits"]
    forward: Floats
    backward: Floats
    sums: Floats
    sent: Times

    @property
    def busy(self) -> Floats:
        """Seconds in which each unit computes, [U]."""
        return self.forward + self.backward

    def phases(self, units: Ints) -> tuple[Phases, Phases]:
        """Return the seconds of a domain's units by phase, forward and backward, of the slowest of them."""
        ahead, behind = (float(seconds[units].max()) for seconds in self.sent)
        slowest = units[np.argmax((self.backward + self.sums)[units])]
        there: dict[str, float] = {self.name: float(self.forward[units].max())}
        back: dict[str, float] = {self.name: float(self.backward[slowest])}
        return (
            Phases(**there, all_to_all=ahead),
            Phases(**back, all_to_all=behind, tensor_parallel=float(self.sums[slowest])),
        )


def loss_work(section: Section) -> EndWork:
    """Return the seconds of the output matrix and of the loss; 0 except on a last stage."""
    job, stage = section.job, section.placement.stage
    nothing, times, sums = (np.zeros(len(section.units)) for _ in range(3))
    if np.any(section.parts.is_last):
        rows = computed_rows(job, section.arrays.tokens.astype(float), stage.in_fp8)
        for speeds, units in stage.by_kind:
            times[units] = sum(logits_times(speeds, job, rows[units]))
        times = section.part.is_last * times
        # One all-reduce is for the loss. A block of multi-token prediction has one for its own loss, two for
        # the input of its projection, which is 2 h wide, and one for the projection's output.
        each = tensor_parallel_seconds(job, rows, stage.bandwidth, stage.latency)
        sums = section.part.is_last * ((1 + 4 * job.model.mtp_layers) * each)
    return EndWork("logits", nothing, times, sums, Times(nothing, nothing))
