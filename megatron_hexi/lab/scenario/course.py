"""The course of a job under a policy: iterations done, lost and repeated while the cluster changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from megatron_hexi.lab.scenario.candidate_plans import PlacedPlan, Plans
from megatron_hexi.lab.scenario.conditions import Period
from megatron_hexi.lab.scenario.scenario_model import Recovery


@dataclass(frozen=True)
class CoursePiece:
    """A time of constant tokens/s, in seconds since the start; 0 tokens/s: nothing is trained."""

    begin_s: float
    end_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Course:
    """The result of a policy.

    Args:
        iterations: iterations done and kept at the end, with the part of the current one.
        lost_iterations: iterations since the last checkpoint that were lost with a node.
        pieces: tokens/s over time, in order.
    """

    policy: str
    iterations: float
    lost_iterations: float
    restarts: int
    swaps: int
    pieces: tuple[CoursePiece, ...]

    @property
    def stopped_s(self) -> float:
        """Seconds without training: no plan for the remaining nodes, restarts, swaps."""
        return sum(piece.end_s - piece.begin_s for piece in self.pieces if not piece.tokens_per_s)


class Runner(ABC):
    """A job under a policy, with whole iterations and the part of the current one."""

    policy: str

    def __init__(self, plans: Plans, recovery: Recovery) -> None:
        self.plans, self._recovery = plans, recovery
        self.placed: PlacedPlan | None = plans.given
        self.clock_s = 0.0
        self.iteration, self.part = 0, 0.0
        self._saved = 0
        self._ready_s = 0.0  # when the job trains again
        self._lost = 0.0
        self.restarts = self.swaps = 0
        self._pieces: list[CoursePiece] = []

    @abstractmethod
    def choose(self, period: Period) -> PlacedPlan | None:
        """Return the plan to continue with when conditions change; any but the present plan is a restart."""

    def train(self, period: Period) -> None:
        """Train until the next decision; at most until the conditions change."""
        self.run_until(period.end_s, period)

    def begun(self) -> None:  # noqa: B027 - most have nothing to note
        """React to a start of the job with another plan; nothing unless a subclass overrides it."""

    def go_through(self, period: Period) -> None:
        """Run through a period."""
        if self.placed is not None and self.placed.nodes & period.conditions.lost:
            self._lose()
        chosen = self.choose(period)
        if chosen is not None and chosen is not self.placed:
            if self.placed is not None:  # stopped with a checkpoint, after an iteration
                self._lost += self.part
                self._saved, self.part = self.iteration, 0.0
            self.placed = chosen
            self.restarts += 1
            self._ready_s = period.begin_s + self._recovery.restart
            self.begun()
        while self.clock_s < period.end_s:
            ready = min(self._ready_s, period.end_s) if self.placed is not None else period.end_s
            if self.clock_s < ready:
                self._pass(ready, 0.0)
            else:
                self.train(period)

    def run_until(self, end_s: float, period: Period) -> int:
        """Train until a time under the present plan.

        Returns:
            Number of iterations that ended.
        """
        assert self.placed is not None
        seconds = self.plans.pace(self.placed, period.conditions).seconds
        iterations = self.part + (end_s - self.clock_s) / seconds
        whole = int(iterations)
        self.iteration += whole
        self.part = iterations - whole
        self._pass(end_s, self.plans.tokens / seconds)
        return whole

    def end_iteration(self, period: Period) -> float:
        """Train until the current iteration ends, or the period.

        Returns:
            The part of an iteration that was trained.
        """
        assert self.placed is not None
        seconds = self.plans.pace(self.placed, period.conditions).seconds
        remaining = 1 - self.part
        end = self.clock_s + remaining * seconds
        if end > period.end_s:
            before = self.part
            whole = self.run_until(period.end_s, period)
            return whole + self.part - before
        self.iteration, self.part = self.iteration + 1, 0.0
        self._pass(end, self.plans.tokens / seconds)
        return remaining

    def stop_for(self, seconds: float) -> None:
        """Stop training for some seconds."""
        self._ready_s = self.clock_s + seconds

    def finished(self) -> Course:
        """Return the result."""
        iterations = self.iteration + self.part
        return Course(self.policy, iterations, self._lost, self.restarts, self.swaps, tuple(self._pieces))

    def _lose(self) -> None:
        """Lose nodes of the job, with its iterations since the last checkpoint."""
        every = self._recovery.checkpoint_every
        self._saved = max(self._saved, self.iteration // every * every)
        self._lost += self.iteration + self.part - self._saved
        self.iteration, self.part = self._saved, 0.0
        self.placed = None

    def _pass(self, until_s: float, tokens_per_s: float) -> None:
        add_piece(self._pieces, CoursePiece(self.clock_s, until_s, tokens_per_s))
        self.clock_s = until_s


def add_piece(pieces: list[CoursePiece], piece: CoursePiece) -> None:
    """Append a piece; pieces of equal tokens/s are joined."""
    if pieces and pieces[-1].tokens_per_s == piece.tokens_per_s:
        piece = replace(piece, begin_s=pieces.pop().begin_s)
    pieces.append(piece)
