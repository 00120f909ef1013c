"""The whole examination: of this process alone, or of a job together with its other ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hexi.doctor.agreement import find_job_problems
from megatron_hexi.doctor.collect import Progress, collect
from megatron_hexi.doctor.facts import Checkout, Facts
from megatron_hexi.doctor.gather import (
    Job,
    adopt_launcher,
    answer,
    find_job,
    joined,
    receive_facts,
    send_facts,
)
from megatron_hexi.doctor.problems import Problem, healthy


@dataclass(frozen=True)
class Findings:
    """What came out.

    Attributes:
        facts: of the ranks that answered, in rank order; empty on all ranks but the first.
        problems: the worst first; likewise.
        healthy: the verdict, on every rank.
    """

    facts: Sequence[Facts]
    problems: Sequence[Problem]
    healthy: bool


def launched_job() -> Job | None:
    """The job of several ranks that torchrun or srun started this process for, if it did.

    Raises:
        HexiError: the launcher's variables are not right.
    """
    # A rank that cannot reach the store shall say so in one line, without the stack of torch's C++ half,
    # which reads this when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        adopt_launcher()
    except ImportError:
        return None  # without torch there is no store: every rank says so by itself
    return find_job(os.environ)


def examine(
    job: Job | None, checkout: Checkout | None, timeout_s: float, progress: Progress | None = None
) -> Findings:
    """Examine this process, and with it the others of its job.

    Args:
        job: as `launched_job` gives it; ``None`` to look at this process only.
        checkout: what was found out about a Megatron-LM checkout.
        timeout_s: how long rank 0 waits for the others, and they for rank 0.
        progress: told what is looked at.

    Raises:
        HexiError: the other ranks cannot be reached.
    """
    if job is None:
        rank = os.environ.get("RANK", "")
        facts = [collect(int(rank) if rank.isdecimal() else None, checkout, progress)]
        problems = find_job_problems(facts)
        return Findings(facts, problems, healthy(problems))
    own = collect(job.rank, checkout, progress)
    with joined(job, timeout_s) as store:
        if job.rank != 0:
            return Findings((), (), send_facts(store, own, 2 * timeout_s))
        facts, silent = receive_facts(store, job, own, timeout_s)
        problems = find_job_problems(facts, silent)
        verdict = healthy(problems)
        answer(store, job, len(facts), healthy=verdict)
    return Findings(facts, problems, verdict)
