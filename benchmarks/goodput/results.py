"""Results of the trials of a job, and the figures that follow from them; kept as JSON beside the page."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.goodput.failures import FailureKind

#: File of the results of each kind of job, in the folder of the page.
FILES = {"sick": "goodput.json", "ordinary": "goodput-ordinary.json"}
#: Relative difference of two losses of one iteration, in fp32 under different plans.
LOSSES_WITHIN = 1e-5


@dataclass(frozen=True)
class Blow:
    """A failure as it happened.

    Args:
        kind: kind of failure.
        nodes: nodes that it hit.
        iteration: greatest iteration that had ended.
        at_s: seconds since the job began.
        load: load of the machine, as ``uptime`` gives it for the last minute.
    """

    kind: FailureKind
    nodes: tuple[str, ...]
    iteration: int
    at_s: float
    load: float


@dataclass(frozen=True)
class Trial:
    """A job from its start to its end.

    Args:
        wall_s: seconds from the start of its agents to the end of its last iteration.
        done: the end of each iteration, in seconds since the start, and its number; done again: twice.
        losses: loss of each entry of `done`.
        blows: the failures.
        begins: iteration that each later round of `megatron_hexi.elastic` begins with, and its first sample.
    """

    wall_s: float
    done: list[tuple[float, int]]
    losses: list[float]
    blows: list[Blow]
    begins: list[tuple[int, int]]

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration: the median time between two ends."""
        return statistics.median(now - before for (before, _), (now, _) in itertools.pairwise(self.done))

    @property
    def began_s(self) -> float:
        """Seconds from the start of the agents to that of the first iteration."""
        return self.done[0][0] - self.iteration_s

    def again(self) -> int:
        """Return how many iterations were done that had been done before."""
        return len(self.done) - len({iteration for _, iteration in self.done})

    def regained_s(self) -> list[float]:
        """Return, of each failure, the seconds until an iteration ended that had not ended before it."""
        return [
            next((seconds for seconds, iteration in self.done if iteration > blow.iteration), self.wall_s)
            - blow.at_s
            for blow in self.blows
        ]

    def stopped_s(self) -> list[float]:
        """Return, of each failure, the longest time without training after it, until the next failure."""
        found = []
        until = [*(later.at_s for later in self.blows[1:]), self.wall_s]
        for blow, end in zip(self.blows, until, strict=bool(self.blows)):
            ends = [blow.at_s, *(seconds for seconds, _ in self.done if blow.at_s < seconds <= end)]
            longest = max((now - before for before, now in itertools.pairwise(ends)), default=0.0)
            found.append(max(0.0, longest - self.iteration_s))
        return found

    def restart_s(self) -> float:
        """Return the median time without training after failures of ranks alone; without any, of all."""
        stops = list(zip(self.blows, self.stopped_s(), strict=True))
        of_ranks = [seconds for blow, seconds in stops if blow.kind == "rank"]
        return statistics.median(of_ranks or [seconds for _, seconds in stops] or [0.0])

    def worst_loss(self, still: Trial) -> float:
        """Return the greatest relative difference of a loss from the undisturbed one of its iteration."""
        right = {iteration: loss for (_, iteration), loss in zip(still.done, still.losses, strict=True)}
        own = zip(self.done, self.losses, strict=True)
        return max(abs(loss / right[iteration] - 1) for (_, iteration), loss in own)

    def problems(self, still: Trial, settings: Settings) -> list[str]:
        """Return what is wrong with iterations: every one is to be done, with the undisturbed loss."""
        found = []
        if missing := set(range(1, settings.iterations + 1)) - {iteration for _, iteration in self.done}:
            found.append(f"iterations {sorted(missing)} were not done")
        if (worst := self.worst_loss(still)) > LOSSES_WITHIN:
            found.append(f"a loss differs by {worst:.1e}")
        return found

    def sample_problems(self, settings: Settings) -> list[str]:
        """Return which samples of an elastic job were not consumed once, by its log.

        Each round is to begin with the sample after the last one of the iteration before, and to say so.
        """
        found = [
            f"iteration {iteration} began with sample {sample}"
            for iteration, sample in self.begins
            if sample != (iteration - 1) * settings.batch
        ]
        if unsaid := set(self.jumps()) - {iteration for iteration, _ in self.begins} - {1}:
            found.append(f"nobody said which samples iterations {sorted(unsaid)} began with")
        return found

    def jumps(self) -> list[int]:
        """Return the iterations that did not follow the one that had ended before them."""
        numbers = [0, *(iteration for _, iteration in self.done)]
        return [now for before, now in itertools.pairwise(numbers) if now != before + 1]


@dataclass(frozen=True)
class Predicted:
    """Tokens of kept iterations, as a part of what the job does without failures, of both ways.

    Args:
        elastic: under `megatron_hexi.elastic`.
        restarted: under torchrun, from checkpoints.
    """

    elastic: float
    restarted: float


@dataclass(frozen=True)
class Settings:
    """Settings of a run, and where it ran.

    Args:
        job: kind of job, a key of `FILES`.
        iterations: length of the job.
        every: mean distance of failures, iterations.
        seed: seed of the failures.
        batch: samples of an iteration.
        repair_s: seconds until a killed node is started again.
        speed: factor on the emulated GPUs' rates.
        save_interval: iterations between checkpoints.
        copy_interval: iterations between copies in memory, of the elastic job alone.
        lost_after_s: silence of a rank that counts as its loss, seconds, likewise.
        machine: cores, kind of CPU, and versions of what ran.
        date: when it ran.
    """

    job: str
    iterations: int
    every: int
    seed: int
    batch: int
    repair_s: float
    speed: float
    save_interval: int
    copy_interval: int
    lost_after_s: float
    machine: dict[str, str]
    date: str


@dataclass(frozen=True)
class Goodput:
    """The trials of one run of the benchmark.

    Args:
        settings: settings of the run.
        undisturbed: under torchrun, without failures.
        elastic: under `megatron_hexi.elastic`.
        restarted: under torchrun, from checkpoints.
        predicted_run: what the scenario simulator predicts of these trials.
        predicted_week: what it predicts of a week on 64 GPUs.
    """

    settings: Settings
    undisturbed: Trial
    elastic: Trial
    restarted: Trial
    predicted_run: Predicted | None = None
    predicted_week: Predicted | None = None

    def part(self, trial: Trial) -> float:
        """Return the goodput of a trial: wall time of the undisturbed one over its own."""
        return self.undisturbed.wall_s / trial.wall_s

    def trained_part(self, trial: Trial) -> float:
        """Return the goodput from the first iteration on, without the start of the jobs."""
        still = self.undisturbed
        return (still.wall_s - still.began_s) / (trial.wall_s - trial.began_s)

    def problems(self) -> list[str]:
        """Return what the trials did otherwise than they must; empty where all is right."""
        still, settings = self.undisturbed, self.settings
        elastic = [*self.elastic.problems(still, settings), *self.elastic.sample_problems(settings)]
        return [
            *(f"elastic: {problem}" for problem in elastic),
            *(f"restarted: {problem}" for problem in self.restarted.problems(still, settings)),
        ]


def read_result[Kind: (Goodput, Trial, Settings)](path: Path, kind: type[Kind]) -> Kind:
    """Read what `result_text` has written of an earlier run.

    Raises:
        OSError: there is no such file.
        ValueError: it is not of this benchmark.
    """
    return TypeAdapter(kind).validate_json(path.read_text())


def result_text(result: Goodput | Trial | Settings) -> str:
    """Return a result as the text of its file."""
    return json.dumps(_rounded(dataclasses.asdict(result))) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.8g}")  # more than losses are compared by
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
