"""`python -m benchmarks.simulation`: plans the suite and writes docs/results/simulation.md with its pictures.

Results are kept in simulation.json beside the page; with --only, the cells that do not match keep theirs, and
with --page nothing is planned at all.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import megatron_hexi
from benchmarks.simulation.cells import Cell, load_cluster, suite
from benchmarks.simulation.measure import Outcome, measure_all
from benchmarks.simulation.page import write_page
from benchmarks.simulation.results import Result, read_results, results_text
from benchmarks.simulation.summary import ROUNDING, findings, summary_table


def main(words: list[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.

    Returns:
        0, or 1 where a cell broke or came out below a baseline.
    """
    options = _parser().parse_args(words)
    cells = suite()
    chosen = [] if options.page else [cell for cell in cells if fnmatch.fnmatch(cell.name, options.only)]
    if not chosen and not options.page:
        print(
            f"--only {options.only}: no cell has such a name; the first is {cells[0].name}", file=sys.stderr
        )
        return 2
    file, times_file = options.output / "simulation.json", options.output / "simulation-times.json"
    results = read_results(file)
    times: dict[str, float] = json.loads(times_file.read_text()) if times_file.exists() else {}
    broken: dict[str, str] = {}
    options.output.mkdir(parents=True, exist_ok=True)
    for cell, outcome in _planned(chosen, options.jobs, options.plans):
        if isinstance(outcome, str):
            broken[cell.name] = outcome
            results.pop(cell.name, None)
        else:
            results[cell.name], times[cell.name] = outcome
        _save(file, times_file, results, times)
    results = {cell.name: results[cell.name] for cell in cells if cell.name in results}
    _save(file, times_file, results, times)
    write_page(results, options.output)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(summary_table([results[cell.name] for cell in chosen if cell.name in results]))
    for line in findings(results):
        console.print(line, markup=False)
    for name, problem in broken.items():
        console.print(f"BROKEN {name}: {problem}", markup=False)
    below = [one for one in results.values() if (one.speed_up_over_all or 1.0) < 1 - ROUNDING]
    return 1 if broken or below else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument(
        "--only", default="*", metavar="GLOB", help="cells to plan, as in 'simulation/sim-64/*'"
    )
    parser.add_argument("--page", action="store_true", help="plan nothing: write page and pictures again")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--plans", type=Path, help="a folder that the plans are kept in")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("docs/results"), help="folder (default %(default)s)"
    )
    return parser


def _planned(cells: Sequence[Cell], jobs: int, plans: Path | None) -> Iterator[tuple[Cell, Outcome]]:
    """Each cell's outcome, as they come."""
    batches: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        key = cell.beside or cell.cluster, cell.model, cell.seq_length, cell.kernel
        batches.setdefault(key, []).append(cell)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        task = progress.add_task("planning", total=len(cells))
        # The largest first, so that no long one is left for the end.
        order = sorted(batches.values(), key=lambda batch: _size(batch[0]), reverse=True)
        running = {pool.submit(measure_all, batch, plans): batch for batch in order}
        for future in as_completed(running):
            for cell, outcome in zip(running[future], future.result(), strict=True):
                progress.update(task, advance=1, description=f"{cell.name:<45}")
                yield cell, outcome


def _size(cell: Cell) -> int:
    return sum(len(load_cluster(name).ranks) for name in cell.beside or (cell.cluster,))


def _save(file: Path, times_file: Path, results: Mapping[str, Result], times: Mapping[str, float]) -> None:
    file.write_text(results_text(results, megatron_hexi.__version__), encoding="utf-8")
    known = {name: times[name] for name in results if name in times}
    times_file.write_text(_times_text(known), encoding="utf-8")


def _times_text(times: Mapping[str, float]) -> str:
    lines = [f"{json.dumps(name)}: {float(f'{seconds:.2g}')}" for name, seconds in times.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
