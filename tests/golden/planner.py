"""Plans of the smaller cells of benchmarks.layouts: their bytes, their seconds, and the lower bound.

All 23 take too long to compare at every change; these seven take a minute of a core.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from benchmarks.layouts import CELLS, asked
from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.plan import dump_plan
from megatron_hexi.planner import Request, find_plan
from tests.golden.values import plain

#: Clusters of up to 48 GPUs: three models of GPU, and two of which one has little memory.
CLUSTERS = ("b", "c")


def cases() -> Iterator[tuple[str, tuple[Request, Cluster]]]:
    """What is asked for in each cell, by its name."""
    for cell in (cell for cell in CELLS if cell[0] in CLUSTERS):
        name, request, cluster = asked(*cell)
        yield name, (request, cluster)


def values(request: Request, cluster: Cluster) -> dict[str, Any]:
    """The plan of a cell, or why there is none."""
    try:
        planned = find_plan(request, cluster)
    except NothingFitsError as problem:
        return {"refused": str(problem)}
    return {
        "plan": hashlib.sha256(dump_plan(planned.plan).encode()).hexdigest()[:16],
        "iteration_s": plain(planned.cost.iteration_s),
        "bound_s": plain(planned.bound.iteration_s),
    }
