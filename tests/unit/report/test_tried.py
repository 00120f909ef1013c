"""The table of plans that a search timed: every row against the cost model."""

import contextlib
import csv
import io
from dataclasses import replace

import pytest

from megatron_hexi.cluster import PlannerRules
from megatron_hexi.cost import estimate
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.models import Job, read_model
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.report.tried import TriedPlans
from tests.support.fleets import read_text
from tests.unit.planner.test_simplest import MIXED, REQUEST


def tried(request, known, **terms):
    """The candidates of a search, the rows of its table, and the plan; ``None``: nothing fits."""
    table, candidates, planned = TriedPlans(request, known), [], None

    def note(step, candidate):
        candidates.append(candidate)
        table.note(step, candidate)

    with contextlib.suppress(NothingFitsError):
        planned = find_plan(request, known, tried=note, **terms)
    return candidates, list(csv.DictReader(io.StringIO(table.text(planned)))), planned


def test_rows_agree_with_the_cost_model():
    known, request = read_text(MIXED), replace(REQUEST, memory_margin=0.05)
    candidates, rows, planned = tried(request, known, simpler_within=0.05)
    assert len(rows) == len(candidates) > 20
    assert [int(row["number"]) for row in rows] == list(range(1, len(rows) + 1))
    outcomes = set()
    for candidate, row in zip(candidates, rows, strict=True):
        cost = estimate(candidate.plan, candidate.job, known)
        fullest = max(cost.ranks, key=lambda rank: rank.memory_gib / rank.usable_gib)
        assert float(row["iteration_s"]) == pytest.approx(cost.iteration_s, rel=1e-5)
        assert float(row["memory_gib"]) == pytest.approx(fullest.memory_gib, rel=1e-5)
        fits = all(rank.memory_gib <= 0.95 * rank.usable_gib for rank in cost.ranks)
        hosts = all(load.fullness <= 1 for load in cost.host_loads)
        assert (row["outcome"] != "does not fit") == (fits and hosts)
        if row["outcome"] == "slower":
            assert cost.iteration_s >= planned.cost.iteration_s
        elif row["outcome"] in ("chosen", "less simple"):
            assert cost.iteration_s <= planned.cost.iteration_s
        outcomes.add(row["outcome"])
        stages = candidate.plan.stages
        assert ("ministages" in row["stages"]) == any(stage.ministages is not None for stage in stages)
        assert ("host memory" in row["stages"]) == any(stage.offload is not None for stage in stages)
    assert outcomes == {"chosen", "slower", "less simple", "does not fit"}
    steps = {row["step"] for row in rows}
    assert "plans of the joint search" in steps
    assert len(steps) > 1


def test_rows_where_nothing_fits_say_how_much_is_missing():
    known = read_text(MIXED)
    job = Job(read_model("gpt-13b"), 131072, recompute="none")
    request = Request(job, frozenset({"recompute"}), rules=PlannerRules(offload=False))
    _, rows, planned = tried(request, known)
    assert planned is None
    assert rows
    assert {row["outcome"] for row in rows} <= {"does not fit", "forbidden"}
    assert all("GiB short" in row["why"] or row["why"].startswith("--no-") for row in rows)
