"""`python -m benchmarks.memory`: jobs that memory limits, on Zorse's clusters, saving it or not.

Each stands beside Zorse's planner (our reading of arXiv 2507.10392), and beside that with what saves memory
here. All of it is prediction by the cost model.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.layouts import K, asked, merge_stages
from benchmarks.rivals.readings.staged import StagedJudge, spell_stages
from benchmarks.rivals.readings.zorse import zorse
from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.improve import Improvement
from megatron_hexi.planner.joint import JointSearches
from megatron_hexi.planner.notes import spell_savings

#: Cluster, model, context, batch, precision.
CELLS = (
    ("zorse-a", "llama3-70b", 16 * K, 16, "bf16"),
    ("zorse-a", "llama3-70b", 32 * K, 16, "bf16"),
    ("zorse-b", "llama3-70b", 2 * K, 128, "fp16"),
    ("zorse-b", "llama3-70b", 16 * K, 16, "fp16"),
    ("zorse-c", "llama3-70b", 2 * K, 128, "fp16"),
    ("zorse-c", "llama3-70b", 16 * K, 16, "fp16"),
)


class Row(NamedTuple):
    """A cell; seconds of an iteration, infinite where nothing fits.

    Args:
        name: of the cell.
        unsaved_s: of the best plan without what saves memory.
        plan_s: of the plan.
        zorse_s: of Zorse's planner's layout.
        zorse_saved_s: of that with what saves memory.
        what: what the plan saves memory with.
        layout: its stages.
    """

    name: str
    unsaved_s: float
    plan_s: float
    zorse_s: float
    zorse_saved_s: float
    what: str
    layout: str


def measure(name: str, request: Request, machines: Cluster) -> Row:
    """One cell."""
    unsaved_s = plan_s = math.inf
    what = layout = ""
    try:
        planned = find_plan(request, machines)
        unsaved_s, plan_s = planned.unsaved_s, planned.cost.iteration_s
        what, layout = spell_savings(planned.plan), spell_stages(planned.plan, machines)
    except NothingFitsError:
        pass
    found = zorse(StagedJudge(request, machines))
    moves = Improvement(request, machines, 1.0, JointSearches(lambda *_: None))
    saved = None if found is None else moves.climbed([found], math.inf)
    return Row(
        name,
        unsaved_s,
        plan_s,
        math.inf if found is None or not found.fits else found.iteration_s,
        math.inf if saved is None else saved.iteration_s,
        what,
        merge_stages(layout) if layout else "",
    )


_HEAD = """\
| cell: cluster, model, context, batch | plan, s | without, s | Zorse, s | Zorse with, s | what saves memory |
|---|---:|---:|---:|---:|---|"""


def table(rows: Iterable[Row]) -> str:
    """Of all cells, in Markdown."""
    return "\n".join([_HEAD, *map(_line, rows)])


def _line(row: Row) -> str:
    seconds = row.plan_s, row.unsaved_s, row.zorse_s, row.zorse_saved_s
    cells = ["-" if math.isinf(one) else f"{one:.4g}" for one in seconds]
    return f"| {row.name} | {' | '.join(cells)} | {row.what} |"


def rows() -> Iterator[Row]:
    """All cells."""
    for cell in CELLS:
        yield measure(*asked(*cell))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    print(_HEAD)
    for row in rows():
        print(f"{_line(row)} {row.layout}", flush=True)


if __name__ == "__main__":
    main()
