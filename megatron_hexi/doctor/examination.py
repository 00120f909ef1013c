"""Examination of this process alone, or of a job together with its other ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hexi.doctor.facts import Checkout, Facts
from megatron_hexi.doctor.findings import Problem, healthy
from megatron_hexi.doctor.gather import (
    LaunchedJob,
    Progress,
    adopt_launcher,
    answer,
    collect,
    find_job,
    joined,
    receive_facts,
    send_facts,
)
from megatron_hexi.doctor.rules import find_job_problems
from megatron_hexi.whole_number import whole_number


@dataclass(frozen=True)
class Examination:
    """The result of an examination.

    Attributes:
        facts: facts of the ranks that answered, in rank order; empty on all ranks but the first.
        problems: problems, the worst first; likewise.
        healthy: whether there is no error; on every rank.
    """

    facts: Sequence[Facts]
    problems: Sequence[Problem]
    healthy: bool


def launched_job() -> LaunchedJob | None:
    """Return the job of several ranks for which torchrun or srun started this process, if any.

    Raises:
        HexiError: the launcher's variables are wrong.
    """
    # An error of the store is one line, without torch's C++ stack; torch reads this variable at import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        adopt_launcher()
    except ImportError:
        return None  # without torch there is no store: every rank reports by itself
    return find_job(os.environ)


def examine(
    job: LaunchedJob | None, checkout: Checkout | None, timeout_s: float, progress: Progress | None = None
) -> Examination:
    """Examine this process, and the other ranks of its job.

    Args:
        job: the job of `launched_job`; ``None`` to examine this process only.
        checkout: facts about a Megatron-LM checkout.
        timeout_s: time for which rank 0 waits for the others, and they for rank 0.
        progress: callback with the part being examined.

    Raises:
        HexiError: the other ranks cannot be reached.
    """
    if job is None:
        facts = [collect(whole_number(os.environ.get("RANK", "")), checkout, progress)]
        problems = find_job_problems(facts)
        return Examination(facts, problems, healthy(problems))
    local_facts = collect(job.rank, checkout, progress)
    with joined(job, timeout_s) as store:
        if job.rank != 0:
            return Examination((), (), send_facts(store, local_facts, 2 * timeout_s))
        facts, silent = receive_facts(store, job, local_facts, timeout_s)
        problems = find_job_problems(facts, silent)
        verdict = healthy(problems)
        answer(store, job, len(facts), healthy=verdict)
    return Examination(facts, problems, verdict)
