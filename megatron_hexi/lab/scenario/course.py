"""How a job gets on under one policy: iterations done, lost and done again, while the cluster changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from megatron_hexi.lab.scenario.conditions import Stretch
from megatron_hexi.lab.scenario.model import Recovery
from megatron_hexi.lab.scenario.plans import PlacedPlan, Plans


@dataclass(frozen=True)
class Piece:
    """A time at one pace, seconds since the start; 0 tokens/s: nothing is trained."""

    begin_s: float
    end_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Course:
    """What a policy came to.

    Args:
        policy: its name.
        iterations: done and kept at the end, the part of the one under way included.
        lost_iterations: done, and lost with a node: since the last checkpoint.
        restarts: of the job.
        swaps: of plans in the running job.
        pieces: the paces, in order.
    """

    policy: str
    iterations: float
    lost_iterations: float
    restarts: int
    swaps: int
    pieces: tuple[Piece, ...]

    @property
    def stopped_s(self) -> float:
        """Seconds in which nothing was trained: no plan for what is left, restarts, swaps."""
        return sum(piece.end_s - piece.begin_s for piece in self.pieces if not piece.tokens_per_s)


class Runner(ABC):
    """A job under a policy. Iterations are counted whole, with the part of the one under way beside.

    Args:
        plans: of the job.
        recovery: what a lost node costs.
    """

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
        self._pieces: list[Piece] = []

    @abstractmethod
    def choose(self, stretch: Stretch) -> PlacedPlan | None:
        """The plan to go on with as conditions change; another than the present one is a restart."""

    def train(self, stretch: Stretch) -> None:
        """Go on until something is to be decided; at most until the conditions change."""
        self.run_until(stretch.end_s, stretch)

    def begun(self) -> None:  # noqa: B027 - most have nothing to note
        """Note that the job was started with another plan."""

    def go_through(self, stretch: Stretch) -> None:
        """Live through a time of steady conditions."""
        if self.placed is not None and self.placed.nodes & stretch.conditions.lost:
            self._lose()
        chosen = self.choose(stretch)
        if chosen is not None and chosen is not self.placed:
            if self.placed is not None:  # stopped with a checkpoint, after an iteration
                self._lost += self.part
                self._saved, self.part = self.iteration, 0.0
            self.placed = chosen
            self.restarts += 1
            self._ready_s = stretch.begin_s + self._recovery.restart
            self.begun()
        while self.clock_s < stretch.end_s:
            ready = min(self._ready_s, stretch.end_s) if self.placed is not None else stretch.end_s
            if self.clock_s < ready:
                self._pass(ready, 0.0)
            else:
                self.train(stretch)

    def run_until(self, end_s: float, stretch: Stretch) -> int:
        """Train until then under the present plan.

        Returns:
            Iterations that came to their end.
        """
        assert self.placed is not None
        seconds = self.plans.pace(self.placed, stretch.conditions).seconds
        done = self.part + (end_s - self.clock_s) / seconds
        whole = int(done)
        self.iteration += whole
        self.part = done - whole
        self._pass(end_s, self.plans.tokens / seconds)
        return whole

    def end_iteration(self, stretch: Stretch) -> float:
        """Train until the iteration under way ends, or as much of it as the conditions allow.

        Returns:
            The part of an iteration that this was.
        """
        assert self.placed is not None
        seconds = self.plans.pace(self.placed, stretch.conditions).seconds
        left = 1 - self.part
        end = self.clock_s + left * seconds
        if end > stretch.end_s:
            before = self.part
            whole = self.run_until(stretch.end_s, stretch)
            return whole + self.part - before
        self.iteration, self.part = self.iteration + 1, 0.0
        self._pass(end, self.plans.tokens / seconds)
        return left

    def stop_for(self, seconds: float) -> None:
        """Train nothing for a while."""
        self._ready_s = self.clock_s + seconds

    def finished(self) -> Course:
        """What it came to."""
        done = self.iteration + self.part
        return Course(self.policy, done, self._lost, self.restarts, self.swaps, tuple(self._pieces))

    def _lose(self) -> None:
        """Nodes of the job are gone: what it did since its last checkpoint with them."""
        every = self._recovery.checkpoint_every
        self._saved = max(self._saved, self.iteration // every * every)
        self._lost += self.iteration + self.part - self._saved
        self.iteration, self.part = self._saved, 0.0
        self.placed = None

    def _pass(self, until_s: float, tokens_per_s: float) -> None:
        add_piece(self._pieces, Piece(self.clock_s, until_s, tokens_per_s))
        self.clock_s = until_s


def add_piece(pieces: list[Piece], piece: Piece) -> None:
    """Put a piece behind others; two at one pace are one."""
    if pieces and pieces[-1].tokens_per_s == piece.tokens_per_s:
        piece = replace(piece, begin_s=pieces.pop().begin_s)
    pieces.append(piece)
