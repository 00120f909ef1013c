"""Seconds of an iteration by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add


@dataclass(frozen=True)
class Phases:
    """Seconds by phase along the critical path; they add up to the whole time.

    Args:
        token: matrices and norms on tokens, routed experts among them, without the vocabulary's.
        encoder: the encoder of images, with its projectors.
        attention: core attention.
        all_to_all: all-to-alls between the layouts of tokens and of heads, and to routed experts and back,
            with the wait for the slowest rank of an expert domain; features of images to their rows' owners.
        exchange: exposed exchange of keys, values and their gradients between groups.
        tensor_parallel: collectives inside a unit.
        logits: output matrix and loss.
        pipeline: sends between stages.
        bubble: filling and draining of a pipeline.
        gradients: exposed collectives of gradients and weights.
        offload: exposed copies to and from host memory.
        optimizer: the optimizer's step, wherever it is computed.
        spread: waiting for the slowest of GPUs of one kind (spread.py).
    """

    token: float = 0.0
    encoder: float = 0.0
    attention: float = 0.0
    all_to_all: float = 0.0
    exchange: float = 0.0
    tensor_parallel: float = 0.0
    logits: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    gradients: float = 0.0
    offload: float = 0.0
    optimizer: float = 0.0
    spread: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all phases, s."""
        return sum(vars(self).values())

    @property
    def communication(self) -> float:
        """Sum of the phases in which ranks wait for a network or a copy, s."""
        between_units = self.all_to_all + self.exchange + self.tensor_parallel
        return between_units + self.pipeline + self.gradients + self.offload

    def spread_by(self, part: float) -> Phases:
        """Return the phases with `part` of computation, filling and draining added to them as spread."""
        return self + Phases(
            spread=part * (self.token + self.encoder + self.attention + self.logits + self.bubble)
        )

    @property
    def by_name(self) -> dict[str, float]:
        """Seconds of each phase by name."""
        return dict(vars(self))

    def __add__(self, other: Phases) -> Phases:
        return Phases(*map(add, vars(self).values(), vars(other).values()))

    def added(self, others: Sequence[Phases], counts: Sequence[float]) -> Phases:
        """Return these phases with others added, each as often as its count says."""
        totals = list(vars(self).values())
        for other, count in zip(others, counts, strict=True):
            totals = [total + count * part for total, part in zip(totals, vars(other).values(), strict=True)]
        return Phases(*totals)

    def __mul__(self, count: float) -> Phases:
        return Phases(*(count * part for part in vars(self).values()))
