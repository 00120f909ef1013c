"""Phases of an iteration's time."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add


@dataclass(frozen=True)
class Phases:
    """Seconds by phase, along the slowest way through; they add up to the whole.

    Args:
        token: matrices and norms on tokens, vocabulary aside.
        attention: attention on heads.
        all_to_all: between the layouts of tokens and of heads; to routed experts and back, with the wait for
            the slowest of them.
        exchange: waiting for keys, values and their gradients of other groups; what overlap does not hide.
        tensor_parallel: sums inside a unit.
        logits: output matrix and loss.
        pipeline: sends between stages.
        bubble: a pipeline filling and draining.
        gradients: gradients and weights between all ranks; what overlap does not hide.
        offload: copies to and from host memory; what overlap does not hide.
        optimizer: the optimizer's step, wherever it is computed.
        spread: waiting for the slowest of GPUs of one kind (spread.py).
    """

    token: float = 0.0
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
        """All together."""
        return sum(vars(self).values())

    @property
    def communication(self) -> float:
        """Communication that nothing hides."""
        return (
            self.all_to_all
            + self.exchange
            + self.tensor_parallel
            + self.pipeline
            + self.gradients
            + self.offload
        )

    def spread_by(self, part: float) -> Phases:
        """With that part of computation, filling and draining among it, as spread."""
        return self + Phases(spread=part * (self.token + self.attention + self.logits + self.bubble))

    @property
    def by_name(self) -> dict[str, float]:
        """The phases by name."""
        return dict(vars(self))

    def __add__(self, other: Phases) -> Phases:
        return Phases(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, count: float) -> Phases:
        return Phases(*(count * part for part in vars(self).values()))
