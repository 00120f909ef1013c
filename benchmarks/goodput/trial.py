"""One job from its start to its last iteration, hurt by the failures of a list."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.goodput.agents import METRICS, Agents, elastic, torchrun
from benchmarks.goodput.failures import Failure
from benchmarks.goodput.job import NODES, GoodputJob
from benchmarks.goodput.results import Blow, Trial

_LOOK_S = 0.02
#: A job that ends no iteration for so long hangs.
_HANGS_S = 600.0
_END_S = 120.0
_BEGINS = re.compile(r"hexi: elastic: iteration (\d+) begins with sample (\d+) of the one order")
#: Told what is happening.
Say = Callable[[str], None]


class TrialFailedError(Exception):
    """A job ended badly or hangs; the message has the end of what it printed."""


class _Course:
    """The iterations of a running job, read from the file of ``--hexi-metrics``."""

    def __init__(self, metrics: Path, begun: float) -> None:
        self._file, self._begun = metrics.open(), begun
        self._rest = ""
        self.done: list[tuple[float, int]] = []
        self.losses: list[float] = []

    def look(self) -> int:
        """Read what has come; return the greatest iteration that has ended."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            entry = json.loads(line)
            self.done.append((time.monotonic() - self._begun, entry["iteration"]))
            self.losses.append(entry["loss"])
        return max((iteration for _, iteration in self.done), default=0)

    @property
    def iteration_s(self) -> float:
        """Seconds of the last iteration; 0 before there are two."""
        return self.done[-1][0] - self.done[-2][0] if len(self.done) > 1 else 0.0


def run_trial(
    job: GoodputJob,
    folder: Path,
    failures: Sequence[Failure],
    *,
    is_elastic: bool,
    iterations: int,
    repair_s: float,
    say: Say,
) -> Trial:
    """Train a job to its end.

    Args:
        job: the job.
        folder: a new folder for checkpoints and logs.
        failures: what happens to it, in the order of iterations.
        is_elastic: under `megatron_hexi.elastic`; else under torchrun.
        iterations: number of iterations.
        repair_s: seconds after which a killed node is started again.
        say: told of every failure.

    Raises:
        TrialFailedError: the job ended badly, or hangs.
    """
    folder.mkdir(parents=True)
    folder = folder.resolve()
    metrics = folder / METRICS
    metrics.touch()
    command = elastic(folder, job.copy_interval) if is_elastic else torchrun
    with Agents(folder, command, job, is_elastic) as agents:
        begun = time.monotonic()
        course = _Course(metrics, begun)
        for node in NODES:
            agents.start(node)
        blows: list[Blow] = []
        returns: list[tuple[float, str]] = []
        coming = list(failures)
        while (reached := course.look()) < iterations:
            now = time.monotonic() - begun
            if now - (course.done[-1][0] if course.done else 0.0) > _HANGS_S:
                raise TrialFailedError(f"no iteration in {_HANGS_S:g} s:\n{agents.said()[-6000:]}")
            if ended := [node for node, agent in agents.running.items() if agent.poll() is not None]:
                raise TrialFailedError(
                    f"{ended[0]} has ended at iteration {reached}:\n{agents.said()[-6000:]}"
                )
            for _, node in [entry for entry in returns if entry[0] <= now]:
                agents.start(node)
            returns = [entry for entry in returns if entry[0] > now]
            is_due = bool(coming) and reached >= coming[0].iteration and not returns
            if is_due and all(agents.ranks(node) for node in NODES):  # a failure that hits no rank is none
                failure = coming.pop(0)
                time.sleep(failure.part * course.iteration_s)
                blow = Blow(failure.kind, failure.nodes, course.look(), time.monotonic() - begun, _load())
                _strike(agents, failure)
                if failure.kind in ("node", "two"):
                    returns.append((blow.at_s + repair_s, failure.nodes[0]))
                blows.append(blow)
                say(f"{blow.at_s:.0f} s, iteration {blow.iteration}: {blow.kind} {', '.join(blow.nodes)}")
            time.sleep(_LOOK_S)
        try:
            codes = {node: agent.wait(_END_S) for node, agent in agents.running.items()}
        except subprocess.TimeoutExpired as problem:
            raise TrialFailedError(f"{problem}:\n{agents.said()[-6000:]}") from None
        if any(codes.values()):
            raise TrialFailedError(f"exit codes {codes}:\n{agents.said()[-6000:]}")
        begins = [(int(iteration), int(sample)) for iteration, sample in _BEGINS.findall(agents.said())]
        return Trial(
            wall_s=course.done[-1][0],
            done=[(seconds, iteration) for seconds, iteration in course.done],
            losses=course.losses,
            blows=blows,
            begins=sorted(begins),
        )


def _strike(agents: Agents, failure: Failure) -> None:
    first, *others = failure.nodes
    if failure.kind in ("node", "two"):
        agents.kill(first)
    struck = others if failure.kind == "two" else [first] if failure.kind in ("rank", "stop") else []
    for node in struck:
        for rank in agents.ranks(node)[:1]:
            os.kill(rank.pid, signal.SIGSTOP if failure.kind == "stop" else signal.SIGKILL)


def _load() -> float:
    return os.getloadavg()[0]
