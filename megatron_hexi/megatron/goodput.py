"""What an elastic job does between two iterations: counts those that are kept, takes in nodes that wait.

The count is in the store that rounds hand on. Goodput is the seconds of iterations that no loss undid, of all
seconds since the job began.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_hexi.megatron.metrics import STEP_PARAMETERS
from megatron_hexi.patching import Patch
from megatron_hexi.runtime import stop_watch
from megatron_hexi.runtime.rounds import TRAINING, WANTED, in_round, round_store, whole_store

#: Exit code of ranks that are to be started again, together with nodes that have come.
_START_AGAIN = 75
_STORE = timedelta(seconds=60)


def told_at_start(job: dist.Store, iteration: int | None) -> str:
    """What a round goes on from, and what was lost, for people.

    Args:
        job: the store that rounds hand on.
        iteration: of the checkpoint that is loaded; ``None``: there is none.
    """
    begun = float(job.compare_set("begun", "", str(time.time())))
    if not job.check(["done"]):
        return "begins" if iteration is None else f"goes on from iteration {iteration}"
    done = json.loads(job.get("done"))
    first = iteration or 0
    undone = done["iteration"] - first
    again = f"{undone} iterations are done again" if undone > 0 else "no iteration is done again"
    part = _kept_s(job, iteration) / max(1e-9, time.time() - begun)
    return f"goes on from iteration {first}, {again}; goodput {part:.0%}"


def _kept_s(job: dist.Store, iteration: int | None) -> float:
    """Seconds of the iterations up to a checkpoint."""
    key = f"kept/{iteration}"
    return float(job.get(key)) if iteration is not None and job.check([key]) else 0.0


class RoundSteps:
    """One rank's part between iterations.

    Args:
        args: Megatron's arguments.
        iteration: that the round begins after.
    """

    def __init__(self, args: Namespace, iteration: int) -> None:
        self._leads = args.rank == 0
        self._interval: int = args.save_interval
        self._first = iteration
        self._round, self._job = round_store(_STORE), whole_store(_STORE)
        self._kept_s = _kept_s(self._job, iteration)

    def before_step(self, iteration: int) -> None:
        """Where a checkpoint was just saved: end the round if nodes wait. Rank 0 decides."""
        if iteration == self._first or iteration % self._interval:
            return
        if self._leads:
            self._job.set(f"kept/{iteration}", str(self._kept_s))
            self._round.set(f"waits/{iteration}", "1" if self._round.check([WANTED]) else "")
        if self._round.get(f"waits/{iteration}"):
            if self._leads:
                self._say(f"iteration {iteration}: saved; starts again with a node that has come")
            stop_watch()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(_START_AGAIN)

    def after_step(self, iteration: int, seconds: float) -> None:
        """Count an iteration.

        Args:
            iteration: its number, from 1.
            seconds: that it took.
        """
        if not self._leads:
            return
        self._kept_s += seconds
        if iteration == self._first + 1:
            if self._job.check(["done"]):
                away = time.time() - json.loads(self._job.get("done"))["at"]
                self._say(
                    f"iteration {iteration} has ended, {away:.1f} s after the last one before the restart"
                )
            self._round.set(TRAINING, "")
        self._job.set("done", json.dumps({"iteration": iteration, "at": time.time()}))

    @staticmethod
    def _say(message: str) -> None:
        print(f"hexi: elastic: {message}", file=sys.stderr, flush=True)


_steps: RoundSteps | None = None


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training import get_args

    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        global _steps
        if not in_round():
            return original(*args, **kwargs)
        iteration = signature.bind(*args, **kwargs).arguments["iteration"]
        if _steps is None:
            _steps = RoundSteps(get_args(), iteration)
        _steps.before_step(iteration)
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        _steps.after_step(iteration + 1, time.perf_counter() - begin)
        return result

    return train_step


ROUND_PATCHES = (
    Patch(
        target="megatron.training.training:train_step",
        why="counts iterations, and takes in nodes, under megatron_hexi.elastic",
        build=_counted,
        parameters=STEP_PARAMETERS,
    ),
)
