"""Plans of the 23 cells of benchmarks.layouts: their bytes, their seconds, and the lower bound."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from benchmarks.layouts import CELLS, asked
from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.plan import dump_plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.baselines import find_baselines
from tests.golden.values import plain


def cases() -> Iterator[tuple[str, tuple[Request, Cluster]]]:
    """What is asked for in each cell, by its name."""
    for cell in CELLS:
        name, request, cluster = asked(*cell)
        yield name, (request, cluster)


def values(request: Request, cluster: Cluster) -> dict[str, Any]:
    """The plan of a cell, and the seconds of the baselines that it is compared with."""
    try:
        planned = find_plan(request, cluster)
    except NothingFitsError as problem:
        return {"refused": str(problem)}
    baselines, _ = find_baselines(request, cluster)
    return {
        "plan": hashlib.sha256(dump_plan(planned.plan).encode()).hexdigest()[:16],
        "iteration_s": plain(planned.cost.iteration_s),
        "bound_s": plain(planned.bound.iteration_s),
        "baselines": {one.name: plain(one.trial.iteration_s) for one in baselines if one.trial},
    }
