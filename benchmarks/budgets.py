"""`python -m benchmarks.budgets`: what a plan loses where it is not looked for with `--thorough`.

Plans the cells of the simulation suite as `hexi plan` does without it, beside docs/results/simulation.json,
whose plans were looked for thoroughly.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.simulation.cells import Cell, load_cluster, suite
from benchmarks.simulation.results import Result, read_results
from megatron_hexi.planner import find_plan

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "simulation.json"


@dataclass(frozen=True)
class Short:
    """A cell.

    Args:
        cell: its name.
        planning_s: of the short look, baselines left out that cannot win.
        slower: how much longer its plan takes than the thorough one's, as a part.
        gap: to its own bound.
        thorough_gap: of the thorough one to its.
    """

    cell: str
    planning_s: float
    slower: float
    gap: float
    thorough_gap: float

    @property
    def suite(self) -> str:
        """The part of the suite that it is of."""
        return self.cell.split("/")[0]


def measure(cell: Cell, thorough: Result) -> Short:
    """Plan a cell of which the thorough plan is known."""
    assert thorough.ours is not None
    sizes = {name: getattr(thorough, name) for name in ("tensor_parallel", "pipeline_parallel")}
    planned = find_plan(
        replace(cell.job, **sizes), load_cluster(cell.cluster), data_parallel=cell.data_parallel
    )
    slower = thorough.ours.tokens_per_s / planned.cost.tokens_per_s - 1
    return Short(cell.name, planned.planning_s, slower, planned.gap, thorough.ours.gap)


def main(words: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        words: the command line's; ``None``: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__)
    parser.add_argument("--only", default="*", metavar="GLOB", help="cells to plan, as in 'testbed/*'")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print cells as JSON")
    options = parser.parse_args(words)
    known = {name: result for name, result in read_results(RESULTS).items() if result.ours is not None}
    cells = [cell for cell in suite() if cell.name in known and fnmatch.fnmatch(cell.name, options.only)]
    if not cells:
        parser.error(f"--only {options.only}: no cell with a plan has such a name, as {next(iter(known))}")
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        found = pool.map(measure, cells, (known[cell.name] for cell in cells))
        console = Console(stderr=True)
        shorts = list(track(found, "planning", total=len(cells), console=console, transient=True))
    if options.json:
        print(json.dumps([asdict(short) for short in shorts], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(_table(shorts))
    return 0


def _table(shorts: Sequence[Short]) -> Table:
    """A line for each part of the suite, and one for all."""
    table = Table(
        "suite", "cells", "seconds: median", "longest", "slower: mean", "most", "gap: median", "thorough"
    )
    for name in dict.fromkeys(short.suite for short in shorts):
        table.add_row(name, *_row([short for short in shorts if short.suite == name]))
    table.add_row("all", *_row(shorts))
    return table


def _row(shorts: Sequence[Short]) -> list[str]:
    seconds = [short.planning_s for short in shorts]
    slower = [short.slower for short in shorts]
    gaps = [
        statistics.median(values) for values in zip(*((s.gap, s.thorough_gap) for s in shorts), strict=True)
    ]
    return [
        str(len(shorts)),
        f"{statistics.median(seconds):.2f}",
        f"{max(seconds):.2f}",
        f"{statistics.fmean(slower):.2%}",
        f"{max(slower):.1%}",
        *(f"{gap:.1%}" for gap in gaps),
    ]


if __name__ == "__main__":
    sys.exit(main())
