"""docs/results/goodput.md: the trials of two jobs, beside what the scenario simulator predicts of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.goodput.picture import draw_courses
from benchmarks.goodput.predict import WEEK_ELASTIC, WEEK_RESTARTED
from benchmarks.goodput.results import LOSSES_WITHIN, Goodput, Trial
from megatron_hexi.text_file import write_text_atomically

_INTRODUCTION = """# Goodput of a whole job

**Measured on one machine's CPUs, which emulate three nodes; not run with NCCL on GPUs.**

Written by `python -m benchmarks.goodput` and `--ordinary` (`--page`: from [goodput.json](goodput.json) and
[goodput-ordinary.json](goodput-ordinary.json), which have every iteration); do not edit. A job of Megatron
is trained three times: undisturbed under torchrun; under [`megatron_hexi.elastic`](../surviving.md) with
failures; and with the same failures under torchrun, which starts all ranks again from checkpoints
(`--max-restarts`).

- A GPT of 3 million parameters (fp32, gloo) on four GPUs of three nodes, which are agents with their ranks.
  GPUs are [paced](../testbed.md#what-a-paced-figure-is-made-of).
- Failures come at moments drawn by a seed: a rank is killed; a node with its agent, which comes back; a rank
  is stopped; a node and a rank of another at once.
- The elastic job keeps copies in memory (`--copy-interval`), and takes a rank for lost after {lost:g} s of
  silence. Under torchrun a collective gives up after a minute, the least that Megatron takes
  (`--distributed-timeout-minutes 1`; else ten).
- Wall time: from the start of the agents to the end of the last iteration. Goodput: the undisturbed wall time
  over it; from the first iteration on: without the seconds until then, of both.

![Iterations of the three trials of each job over time](goodput/courses.png)
"""
_JOB = """
## {title} job

{iterations} iterations of {iteration_s:.1f} s (longer on fewer GPUs) and {count} failures, by seed {seed}; a
killed node comes back after {repair_s:g} s. Checkpoints every {save} iterations; copies in memory every
{copy}. {how}
"""
_HOW = {
    "sick": "The trials ran one after the other.",
    "ordinary": "The trials ran at the same time: paced GPUs mostly wait, so each needs little of a core.",
}
_KINDS = {"rank": "a rank", "node": "a node", "stop": "a rank, stopped", "two": "a node and a rank"}
_NAMES = {"elastic": "`megatron_hexi.elastic`", "restarted": "torchrun, from checkpoints"}


def write_page(jobs: Sequence[Goodput], folder: Path) -> None:
    """Write the page and its picture.

    Args:
        jobs: the results of each job; one at least.
        folder: folder of the page.
    """
    (folder / "goodput").mkdir(parents=True, exist_ok=True)
    picture = folder / "goodput" / "courses.png"
    draw_courses(jobs).savefig(picture, dpi=110, metadata={"Software": None})
    write_text_atomically(folder / "goodput.md", "\n".join(_lines(jobs)) + "\n")


def _lines(jobs: Sequence[Goodput]) -> Iterator[str]:
    yield _INTRODUCTION.format(lost=jobs[0].settings.lost_after_s).rstrip("\n")
    for goodput in jobs:
        yield from _job_lines(goodput)
    yield from _predictions(jobs)
    for goodput in jobs:
        settings, machine = goodput.settings, goodput.settings.machine
        yield (
            f"The {settings.job} job: measured {settings.date} on {machine['cores']} cores "
            f"({machine['cpu']}), Python {machine['python']}, torch {machine['torch']}, "
            f"megatron-core {machine['megatron-core']}."
        )
    yield "Run by root, the benchmark's processes weigh nine times others' in the scheduler."


def _job_lines(goodput: Goodput) -> Iterator[str]:
    settings = goodput.settings
    yield _JOB.format(
        title=f"{'An' if settings.job[0] in 'aeiou' else 'A'} {settings.job}",
        count=len(goodput.elastic.blows),
        iteration_s=goodput.undisturbed.iteration_s,
        iterations=settings.iterations,
        seed=settings.seed,
        repair_s=settings.repair_s,
        save=settings.save_interval,
        copy=settings.copy_interval,
        how=_HOW[settings.job],
    )
    yield "| | wall time | goodput | from the first iteration on | iterations done again | losses within |"
    yield "|---|---:|---:|---:|---:|---:|"
    yield f"| undisturbed | {goodput.undisturbed.wall_s:.0f} s | 100% | 100% | 0 | |"
    for name, title in _NAMES.items():
        trial: Trial = getattr(goodput, name)
        yield (
            f"| {title} | {trial.wall_s:.0f} s | {goodput.part(trial):.1%} | "
            f"{goodput.trained_part(trial):.1%} | {trial.again()} | "
            f"{trial.worst_loss(goodput.undisturbed):.1e} |"
        )
    yield ""
    yield _correctness(goodput)
    yield ""
    yield (
        "Seconds from each failure until an iteration ended that had not ended before it, which takes time "
        "itself, and the load of the machine then (of the last minute; other programs ran beside):"
    )
    yield ""
    yield "| failure | after iteration | elastic | load | torchrun | load |"
    yield "|---|---:|---:|---:|---:|---:|"
    rows = zip(
        goodput.elastic.blows,
        goodput.elastic.regained_s(),
        goodput.restarted.blows,
        goodput.restarted.regained_s(),
        strict=True,
    )
    for ours, ours_s, theirs, theirs_s in rows:
        yield (
            f"| {_KINDS[ours.kind]} | {ours.iteration} | {ours_s:.1f} | {ours.load:.1f} | {theirs_s:.1f} | "
            f"{theirs.load:.1f} |"
        )
    yield ""


def _predictions(jobs: Sequence[Goodput]) -> Iterator[str]:
    """Yield the section of predictions, where there are any."""
    predicted = [job for job in jobs if job.predicted_run is not None]
    week = next((job.predicted_week for job in predicted), None)
    if week is None:
        return
    yield "## Predicted"
    yield ""
    restarts = " and ".join(
        f"{job.elastic.restart_s():.1f} s and {job.restarted.restart_s():.1f} s ({job.settings.job})"
        for job in predicted
    )
    yield (
        "The [scenario simulator](../scenarios.md) is given the failures at the seconds at which they "
        "came, and the median time without training after a killed rank, measured above, of elastic and "
        f"torchrun: {restarts}. It predicts the rest: plans for the nodes that are left and their speed, "
        "iterations done again, waits for a node. Its policy *re-planning* stands for "
        "`megatron_hexi.elastic`, *static* for torchrun. Goodput, from the first iteration on:"
    )
    yield ""
    yield "| | elastic, measured | predicted | torchrun, measured | predicted |"
    yield "|---|---:|---:|---:|---:|"
    for job in predicted:
        run = job.predicted_run
        assert run is not None, "only those with a prediction are taken"
        yield (
            f"| the {job.settings.job} job | {job.trained_part(job.elastic):.1%} | {run.elastic:.1%} | "
            f"{job.trained_part(job.restarted):.1%} | {run.restarted:.1%} |"
        )
    yield f"| a week on 64 H100 | | {week.elastic:.1%} | | {week.restarted:.1%} |"
    yield ""
    (copies, quick), (saves, slow) = WEEK_ELASTIC, WEEK_RESTARTED
    yield (
        "The week: llama3-8b, 512 sequences of 8192 tokens, on eight nodes, each of which fails every "
        f"other day on average and takes two hours to mend. Assumed, not measured: copies every {copies} "
        f"iterations and {quick} s until all train again under elastic; checkpoints every {saves} and "
        f"{slow} s under torchrun, whose job waits for the node."
    )
    yield ""


def _correctness(goodput: Goodput) -> str:
    if problems := goodput.problems():
        return "**Not as it must be: " + "; ".join(problems) + ".**"
    begun = ", ".join(f"{iteration} with {sample}" for iteration, sample in goodput.elastic.begins)
    return (
        f"Every loss, of iterations done again too, is the undisturbed one within {LOSSES_WITHIN:g}. Each "
        "row of the data is consumed once: by their logs, later rounds of the elastic job began iteration "
        f"{begun} of the one order, {goodput.settings.batch} rows an iteration."
    )
