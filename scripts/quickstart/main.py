"""The main job: a small GPT trained under uneven plans, beside the same training on one rank.

All train on real text, by Megatron's own loop, from the same weights. One plan cuts tokens and heads
unevenly, the other gives stages their own layers, ranks and shares of the batch. The demo holds their losses
against each other, and says what each rank had to do.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_hexi.errors import user_errors
from megatron_hexi.plan import write_plan
from scripts.quickstart.corpus import build_corpus
from scripts.quickstart.folder import run_folder
from scripts.quickstart.job import (
    DATA,
    PLAN,
    RECORD,
    SPEEDS,
    STAGES,
    WORKLOAD,
    Launch,
    demo_job,
    demo_plan,
    stages_plan,
)
from scripts.quickstart.results import LOSS_LIMIT, read_results, results_table, save_results
from scripts.quickstart.training import Training, TrainingFailed, follow

_REPOSITORY = Path(__file__).resolve().parents[2]
_INTERRUPTED = 128 + signal.SIGINT

console = Console(width=None if sys.stdout.isatty() else 120)


def main() -> int:
    """Run the demo by the command line.

    Returns:
        The exit code.
    """
    options = _parse_arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        with user_errors(), run_folder(options.out) as folder:
            return run(folder, options.iterations)
    except TrainingFailed as problem:
        console.print(str(problem), markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; every process that was started has ended")
        return _INTERRUPTED


def run(folder: Path, iterations: int) -> int:
    """Train, compare and report.

    Returns:
        The exit code: 0 if the two trainings are the same and have learnt something, else 1.
    """
    begin = time.monotonic()
    console.print(f"everything is written to {folder}", highlight=False, soft_wrap=True)
    plan, job = demo_plan(), demo_job(iterations)
    write_plan(plan, folder / PLAN)
    write_plan(stages_plan(), folder / STAGES)
    (folder / DATA).parent.mkdir()
    corpus = build_corpus(folder / DATA)
    console.print(
        f"text: {corpus.files} files of Python's standard library, {corpus.tokens:,} tokens of one byte\n"
        f"plan: {WORKLOAD.seq_length} tokens and {WORKLOAD.heads} heads on {job.uneven.ranks} ranks of speed "
        + " + ".join(str(list(group)) for group in SPEEDS)
    )
    _train(folder, [job.initial])
    _train(folder, [job.alone, job.uneven])
    _train(folder, [job.stages])

    hexi = Path(sys.executable).with_name("hexi")
    results = read_results(folder, job)
    picture = save_results(results, folder, (job.alone.title, job.uneven.title, job.stages.title))
    console.print(results_table(plan, results))
    console.print(
        f"loss: {results.losses_uneven[0]:.3f} at first, {results.losses_uneven[-1]:.3f} in the last of "
        f"{iterations} iterations\n"
        f"largest relative difference of the loss: {results.loss_difference:.1e} (limit {LOSS_LIMIT:.0e}), "
        f"of the gradient norm: {results.grad_norm_difference:.1e}\n"
        f"stages of 1 and 3 layers on 2 and 1 ranks beside one of 4 layers on 2, {job.stages.iterations} "
        f"iterations: {results.stages_difference:.1e}\n"
        f"picture: {picture}\n"
        f"each rank's time and memory, as a page: {hexi} report {folder / PLAN} --record {folder / RECORD} "
        f"-o {folder / 'report.html'}\n"
        f"took {time.monotonic() - begin:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    for problem in results.problems:
        console.print(f"FAILED: {problem}", style="bold red")
    if not results.problems:
        console.print("The uneven trainings are the same training.", style="bold green")
    return 1 if results.problems else 0


def _train(folder: Path, launches: Sequence[Launch]) -> None:
    """Train side by side, with a bar each that follows the metrics."""
    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]:10}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {
            launch.name: bars.add_task(launch.title, total=None, state="starting") for launch in launches
        }

        def show(training: Training) -> None:
            if training.losses:  # until then the bar has no total, and pulses
                bars.update(
                    tasks[training.launch.name],
                    completed=len(training.losses),
                    total=training.launch.iterations,
                    state=f"loss {training.losses[-1]:.3f}",
                )

        follow(launches, folder, show)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Example: make demo ARGS='--iterations 20 --out /tmp/demo'. "
        "Exit codes: 0 the two trainings are the same, 1 they are not or one failed, 2 the input is wrong.",
    )
    parser.add_argument(
        "--iterations", type=int, default=40, metavar="N", help="of each training (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=_REPOSITORY / "runs" / "demo",
        metavar="DIR",
        help="where the run is written; one of an earlier demo is emptied (default: runs/demo)",
    )
    options = parser.parse_args()
    if options.iterations < 2:
        parser.error(f"--iterations {options.iterations}: give at least 2, for a loss that can fall")
    return options


def _interrupt(signal_number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
