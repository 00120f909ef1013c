"""Counts the iterations of an elastic job that are kept, and lets waiting nodes join between two of them.

The count is in the store that survives from one round to the next. Goodput is the seconds of iterations that
no loss undid, over all seconds since the job began.
"""

from __future__ import annotations

import inspect
import json
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_hexi.elastic import say
from megatron_hexi.elastic.store import (
    IN_ORDER,
    TRAINING,
    WANTED,
    in_round,
    job_time,
    round_store,
    whole_store,
)
from megatron_hexi.elastic.training.copying import copied_last, is_safe
from megatron_hexi.elastic.training.fencing import ask_fence, end_to_start_again
from megatron_hexi.elastic.training.loading import moved_words
from megatron_hexi.elastic.training.round_plan import START_S
from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.patching import STEP_PARAMETERS, patched
from megatron_hexi.record import Round

#: Seconds that a node which has come waits for a copy to be on two nodes.
_SAFE_S = 40.0


def begin_round(
    job: dist.Store, number: int, iteration: int | None, without: tuple[str, ...], in_memory: bool
) -> Round:
    """Return the facts of a new round: where it resumes, and which iterations were lost.

    Args:
        iteration: iteration of the loaded state; ``None`` if nothing is loaded.
    """
    begun = float(job.compare_set("begun", "", str(job_time())))
    last_iteration = json.loads(job.get("done"))["iteration"] if job.check(["done"]) else 0
    first = iteration or 0
    part = _kept_s(job, iteration) / max(1e-9, job_time() - begun)
    return Round(number, without, first, in_memory, max(0, last_iteration - first), min(1.0, part))


def round_words(now: Round) -> str:
    """Return a sentence on where a round resumes, for the log."""
    if now.number == 1:
        return "begins" if now.resumed == 0 else f"goes on from iteration {now.resumed}"
    again = f"{now.undone} iterations are done again" if now.undone else "no iteration is done again"
    where = " in memory" if now.in_memory else ""
    return f"goes on from iteration {now.resumed}{where}, {again}; goodput {now.goodput:.0%}"


_round: Round | None = None


def set_round(now: Round) -> None:
    """Store the round of this process, for the record and the log."""
    global _round
    _round = now


def present_round() -> Round | None:
    """Return the round of this process; ``None`` if the job is not elastic."""
    return _round


def log_words() -> str:
    """Return the text that an elastic job appends to Megatron's log line; empty in any other job."""
    if _round is None or _steps is None:
        return ""
    absent = f" | without: {', '.join(_round.without)}" if _round.without else ""
    return f" round: {_round.number}{absent} | goodput: {_steps.goodput():.1%} |"


def _kept_s(job: dist.Store, iteration: int | None) -> float:
    """Return the seconds of all iterations up to a checkpoint."""
    key = f"kept/{iteration}"
    return float(job.get(key)) if iteration is not None and job.check([key]) else 0.0


class RoundSteps:
    """A rank's work between the iterations of an elastic job."""

    def __init__(self, args: Namespace, iteration: int) -> None:
        self._leads = args.rank == 0
        self._writes = args.rank in (0, args.world_size - 1)  # the record and counts; the log
        self._interval: int = args.save_interval
        self._first = iteration
        self._round, self._job = round_store(), whole_store()
        self._kept_s = _kept_s(self._job, iteration)
        self._begun = float(self._job.get("begun"))
        self._args = args
        if self._leads and iteration > 0:
            self._check_samples(iteration)

    def _check_samples(self, iteration: int) -> None:
        """Check that the round goes on with the sample after the last one that its state has seen."""
        seen, key = self._args.consumed_train_samples, f"samples/{iteration}"
        if self._job.check([key]) and (before := int(self._job.get(key))) != seen:
            raise HexiError(
                f"iteration {iteration}: the loaded state has seen {seen} samples, earlier rounds had seen "
                f"{before} up to there, so that some would come twice or never; give --save a folder that no "
                "other job writes to, and this job a new --rdzv-id"
            )
        order = f"iteration {iteration + 1} begins with sample {seen} of the one order of all plans"
        say(order + moved_words(self._round))

    def before_step(self, iteration: int) -> None:
        """End the round if another is wanted and the state was just saved or copied; rank 0 decides."""
        saved = iteration % self._interval == 0
        if iteration == self._first or not (saved or iteration == copied_last()):
            return
        if self._leads:
            ask_fence()
            self._job.set(f"kept/{iteration}", str(self._kept_s))
            self._job.set(f"samples/{iteration}", str(self._args.consumed_train_samples))
            ends = self._round.check([WANTED]) and (saved or is_safe(iteration, _SAFE_S))
            if ends:
                self._round.set(IN_ORDER, "")
            self._round.set(f"ends/{iteration}", self._round.get(WANTED).decode() if ends else "")
        if wanted := self._round.get(f"ends/{iteration}").decode():
            say_it = f"iteration {iteration}: saved; starts again with {wanted}"
            end_to_start_again(say_it if self._leads else "")

    def after_step(self, iteration: int, seconds: float) -> None:
        """Count an iteration, before Megatron logs it."""
        self._kept_s += seconds
        if self._writes:
            ask_fence()
        if not self._leads:
            return
        if iteration == self._first + 1:
            again = self._job.check(["done"])
            away = job_time() - (json.loads(self._job.get("done"))["at"] if again else self._begun)
            if again:
                say(f"iteration {iteration} has finished, {away:.1f} s after the last one before the restart")
            self._job.set(START_S, str(away))
            self._round.set(TRAINING, "")
        self._job.set("done", json.dumps({"iteration": iteration, "at": job_time()}))

    def goodput(self) -> float:
        """Return the goodput: seconds of iterations that no loss undid, over seconds since the job began."""
        return min(1.0, self._kept_s / max(1e-9, job_time() - self._begun))


_steps: RoundSteps | None = None


@patched(
    "megatron.training.training:train_step",
    why="counts iterations, and takes in nodes, under megatron_hexi.elastic",
    parameters=STEP_PARAMETERS,
)
def _counted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args

    global _steps
    if not in_round():
        return original(*args, **kwargs)
    iteration = inspect.signature(original).bind(*args, **kwargs).arguments["iteration"]
    if _steps is None:
        with user_errors():
            _steps = RoundSteps(get_args(), iteration)
    _steps.before_step(iteration)
    begin = time.perf_counter()
    result = original(*args, **kwargs)
    _steps.after_step(iteration + 1, time.perf_counter() - begin)
    return result


ROUND_PATCHES = (_counted,)
