"""Lanes of a stage of a pipeline, and transfers of its ministages' weights, gradients and rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.phases import Phases


@dataclass(frozen=True, eq=False)
class Passing:
    """Seconds of the transfers of weights, gradients and rows of a stage's ministages.

    Args:
        gathers: all-gather of each ministage's weights from the units that own shares, s, [ministages].
        sums: reduction of its gradients to the units that own them, s, [ministages].
        copies_in: copy of its weights from host memory, s, [ministages].
        copies_out: copy of its gradients to host memory, s, [ministages].
        rows: copy of a micro-batch's rows to host memory, or back, s.
    """

    gathers: Floats
    sums: Floats
    copies_in: Floats
    copies_out: Floats
    rows: float = 0.0

    @classmethod
    def nothing(cls, ministages: int) -> Passing:
        """Return transfers of 0 s: all weights and gradients stay on the device."""
        none = np.zeros(ministages)
        return cls(none, none, none, none)

    def without_host(self) -> Passing:
        """Return the transfers without those to and from host memory."""
        return replace(self, copies_in=0 * self.copies_in, copies_out=0 * self.copies_out, rows=0.0)

    @property
    def is_on_host(self) -> bool:
        """Whether anything is copied to or from host memory."""
        return self.rows > 0 or bool(self.copies_in.any() or self.copies_out.any())


@dataclass(frozen=True)
class Lane:
    """Units of a stage that process micro-batches independently of the stage's other units.

    A lane is one domain that takes whole micro-batches, or all domains that share each micro-batch.

    Args:
        takes: numbers of the micro-batches that it takes, ascending.
        phases: seconds of one micro-batch by phase, over all ministages.
        forward_s: seconds of one forward pass of all layers, which are part of `phases`.
    """

    takes: tuple[int, ...]
    phases: Phases
    forward_s: float

    @property
    def work(self) -> Phases:
        """Seconds of the lane's work in an iteration, by phase."""
        return self.phases * len(self.takes)
