"""Parts of a model whose layers are of several kinds, whole and cut into ministages."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel
from megatron_hexi.cost.layer_kinds import Window
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.plan import Plan, Replica, Stage, proportional_plan
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.plans import examples


@given(st.lists(st.booleans(), min_size=2, max_size=9).filter(any), st.data())
@examples(20)
def test_a_part_cut_into_ministages_is_that_of_a_plan_with_them(windows, data):
    count = data.draw(st.integers(1, len(windows)))
    model = dataclasses.replace(TINY, layers=len(windows), window=Window(64, tuple(windows)))
    job = tiny_job(model=model, global_batch_size=2)
    domain = proportional_plan(job.workload(), [[[1.0], [2.0]]]).replicas[0].domain
    stage = Stage((domain,), (0, len(windows)), ministages=count)
    workload = dataclasses.replace(job.workload(), layers=len(windows))
    timing = CostModel(job, cluster([("n", "PLAIN", 2)])).timing(Plan(workload, (Replica((stage,)),)))
    whole = ModelPart(
        layers=np.full(2, len(windows)),
        again=0,
        is_first=True,
        is_last=True,
        ahead=1,
        ranges=np.tile([[0, len(windows)]], (2, 1, 1)),
    )
    cut, planned = whole.in_ministages(count), timing.sections[0].part
    assert np.array_equal(cut.at_once(model), planned.at_once(model))
    for got, expected in zip(cut.run_twice(model), planned.run_twice(model), strict=True):
        assert np.array_equal(got, expected)
    for held, in_plan in zip(cut.of_kinds(model), planned.of_kinds(model), strict=True):
        assert np.array_equal(held.layers, in_plan.layers)
    last = cut.smallest_ministage
    assert np.array_equal(last.layers, [len(windows) // count] * 2)
    kinds = [int(np.asarray(held.layers)[0]) for held in last.of_kinds(model)]
    tail = windows[len(windows) - len(windows) // count :]
    assert sorted(kinds) == sorted(tail.count(is_window) for is_window in set(windows))
