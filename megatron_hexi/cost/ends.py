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
        sums: seconds of its collectives inside each unit, forward and backward, [2][U].
        sent: exposed seconds of its messages between units, forward and backward, [2][U].
    """

    name: Literal["encoder", "logits"]
    forward: Floats
    backward: Floats
    sums: Times
    sent: Times

    @property
    def busy(self) -> Floats:
        """Seconds in which each unit computes, [U]."""
        return self.forward + self.backward

    @property
    def passes(self) -> Times:
        """Seconds of each unit's passes, with its collectives inside it, [2][U]."""
        return Times(self.forward + self.sums.forward, self.backward + self.sums.backward)

    def phases(self, units: Ints) -> tuple[Phases, ...]:
        """Return the seconds of a domain's units by phase, forward and backward, of the slowest of them."""
        found = []
        for work, sums, sent in zip((self.forward, self.backward), self.sums, self.sent, strict=True):
            slowest = units[np.argmax((work + sums)[units])]
            own: dict[str, float] = {self.name: float(work[slowest]), "tensor_parallel": float(sums[slowest])}
            found.append(Phases(**own, all_to_all=float(sent[units].max())))
        return tuple(found)


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
    return EndWork("logits", nothing, times, Times(nothing, sums), Times(nothing, nothing))
