"""Records of runs for tests: numbers that can be worked out by hand."""

from __future__ import annotations

import dataclasses

from megatron_hexi.plan import plan_digest, proportional_plan
from megatron_hexi.record import Interval, RankTimes, Start, append_to_record
from tests.support.costs import tiny_job

#: For two ranks, 3 : 1 tokens.
JOB = tiny_job(global_batch_size=2)
PLAN = proportional_plan(JOB.workload(), [[[3.0], [1.0]]])
GIB = 2**30


def start(plan=PLAN, **changes):
    """A start of `JOB`."""
    told = Start(
        started="2026-01-02T03:04:05+00:00",
        digest=plan_digest(plan),
        platform="cuda",
        devices=("GPU one", "GPU two"),
        micro_batch_size=1,
        global_batch_size=2,
        pipeline_parallel=1,
        recompute="none",
        precision="bf16",
        distributed_optimizer=True,
        overlap_gradients=True,
        sequence_parallel=True,
    )
    return dataclasses.replace(told, **changes)


def interval(*iterations, seconds=2.0, losses=None, waits=(0.5, 0.25), peaks=(3 * GIB, 2 * GIB)):
    """Iterations of `seconds`; the ranks wait so long in attention, and 0.25 s for gradients each."""
    count = len(iterations)
    return Interval(
        iterations,
        (seconds,) * count,
        tuple(losses or [10.0 / number for number in iterations]),
        2 * 4096,
        RankTimes((seconds, seconds), tuple(waits), (0.25, 0.25), (0.0, 0.0), tuple(peaks)),
    )


def write_record(path, *entries):
    """Starts and intervals as a run would write them."""
    for entry in entries:
        append_to_record(path, entry)
    return path
