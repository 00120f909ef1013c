"""Jobs that begin at once with one folder of checkpoints, each a process; prints how they ended."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

import torch.distributed as dist

from megatron_hexi.elastic.store import ROUND_VARIABLE, PresentRound, change_present
from megatron_hexi.elastic.training import fencing


def begin(save: str, name: str, start: Any) -> None:
    """Begin the first round of a job."""
    job = dist.HashStore()
    change_present(job, lambda _: PresentRound(name, ("a",)))
    os.environ |= {ROUND_VARIABLE: name, "RANK": "0"}
    setattr(fencing, "whole_store", lambda: job)  # noqa: B010
    start.wait(20)
    fencing.take_save(save, job)


def main() -> None:
    """Let four jobs begin at once."""
    fork = multiprocessing.get_context("fork")  # this process has no threads
    start = fork.Barrier(4)
    jobs = [fork.Process(target=begin, args=(sys.argv[1], f"job{number}", start)) for number in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(30)
    print(*(job.exitcode for job in jobs))


if __name__ == "__main__":
    main()
