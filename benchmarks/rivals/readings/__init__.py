"""HexiScale's and Zorse's planners as their papers describe them, timed by our cost model."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.rivals.readings.hexiscale import hexiscale
from benchmarks.rivals.readings.staged import StagedJudge, spell_stages
from benchmarks.rivals.readings.zorse import zorse
from megatron_hexi.cluster import Cluster
from megatron_hexi.planner import Baseline, Request
from megatron_hexi.planner.joint import Candidate

#: The best layout of each published planner, by its name.
PUBLISHED: dict[str, Callable[[StagedJudge], Candidate | None]] = {"hexiscale": hexiscale, "zorse": zorse}


def read_baselines(request: Request, cluster: Cluster) -> tuple[Baseline, ...]:
    """Return the published planners as baselines beside Megatron's; none for models with experts."""
    if request.job.model.experts is not None:
        return ()
    judge = StagedJudge(request, cluster)
    return tuple(_baseline(name, planner(judge), cluster) for name, planner in PUBLISHED.items())


def _baseline(name: str, best: Candidate | None, cluster: Cluster) -> Baseline:
    if best is None:
        return Baseline(name, None, "it has no layout with what is fixed", "", False)
    text = spell_stages(best.plan, cluster)
    if best.fits:
        return Baseline(name, best, "", text, False)
    excess = best.timing.fullness
    return Baseline(name, None, f"short of memory: a GPU needs {excess:.2f} times what it has", text, False)
