"""A pipeline's stages, and the layers that make its slowest stage as fast as possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.period import period_s
from megatron_hexi.plan.recompute import Recompute
from megatron_hexi.planner.joint.pools import StageShape

#: The most rounds in which a layer may move between every pair of stages.
_MOVES = 4


class PipeStage(NamedTuple):
    """A stage of a pipeline.

    Args:
        recompute: its recomputation.
        seconds: seconds of a micro-batch, forward and backward.
    """

    shape: StageShape
    layers: int
    recompute: Recompute
    seconds: float


@dataclass(frozen=True)
class Pipe:
    """A pipeline with its number of micro-batches.

    Args:
        stages: its p stages, the first one first.
        ways: seconds that a micro-batch travels over each border, activations and gradients added, [p - 1].
        micro_batches: micro-batches that it processes in an iteration.
        timed: whether every stage was timed; else some times are estimates.
    """

    stages: tuple[PipeStage, ...]
    ways: tuple[float, ...]
    micro_batches: int
    timed: bool

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """The shape of each stage."""
        return tuple(stage.shape for stage in self.stages)

    @cached_property
    def period_s(self) -> float:
        """Seconds from one micro-batch to the next: `cost.period.period_s`."""
        return period_s([stage.seconds for stage in self.stages], self.ways, self.ways, self.micro_batches)

    @cached_property
    def fill_s(self) -> float:
        """Seconds of the first micro-batch beyond a period."""
        return sum(stage.seconds for stage in self.stages) + 2 * sum(self.ways) - self.period_s

    @property
    def seconds(self) -> float:
        """Seconds of all micro-batches."""
        return self.seconds_of(self.micro_batches)

    def seconds_of(self, micro_batches: int) -> float:
        """Return the seconds of this many micro-batches."""
        return self.fill_s + micro_batches * self.period_s

    def most_within(self, seconds: float) -> int:
        """Return the most micro-batches in this many seconds."""
        return max(0, int((seconds - self.fill_s) / self.period_s * (1 + 1e-12)))


def least_longest(seconds: Floats, layers: int) -> list[int] | None:
    """Return the layers of each stage, at least one, that make the slowest as fast as possible.

    Exact, since more layers never take less time. Surplus layers are taken from the stages whose last layer
    adds most. ``None``: the layers do not fit on the stages.

    Args:
        seconds: seconds of each stage with 1 to L layers, [p, L]; inf: they do not fit.
    """
    if len(seconds) > layers:
        return None
    # Within the seconds of as many of all entries as there are layers, and of one layer on each stage.
    longest = max(np.partition(seconds, layers - 1, axis=None)[layers - 1], seconds[:, 0].max())
    if not np.isfinite(longest):
        return None
    dealt: list[int] = (seconds <= longest).sum(axis=1).tolist()
    for _ in range(sum(dealt) - layers):
        price = [
            times[count - 1] - times[count - 2] if count > 1 else -np.inf
            for times, count in zip(seconds, dealt, strict=True)
        ]
        dealt[price.index(max(price))] -= 1
    return dealt


def moved_layers(
    seconds: Floats, dealt: Sequence[int], ways: Sequence[float], micro_batches: int
) -> list[int]:
    """Return the layers after moves of one layer between stages that shorten the pipeline's time.

    The slowest stage counts for each micro-batch, but the first micro-batch passes all stages: if there are
    few micro-batches, more layers on fast stages may be worth a longer period.

    Args:
        seconds: seconds of each stage with 1 to L layers, [p, L]; inf: they do not fit.
        ways: seconds that a micro-batch travels over each border, activations and gradients added, [p - 1].
    """

    def total(layers: Sequence[int]) -> float:
        stages = [float(times[count - 1]) for times, count in zip(seconds, layers, strict=True)]
        return sum(stages) + (micro_batches - 1) * period_s(stages, ways, ways, micro_batches)

    best, least = list(dealt), total(dealt)
    for _ in range(_MOVES):
        before = least
        for giver, taker in itertools.permutations(range(len(dealt)), 2):
            moved = [*best]
            moved[giver] -= 1
            moved[taker] += 1
            if moved[giver] and np.isfinite(seconds[taker][moved[taker] - 1]) and total(moved) < least:
                best, least = moved, total(moved)
        if least == before:
            break
    return best
