"""Parts of a model whose layers are of several kinds, whole and in ministages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.kinds import Window
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.plans import examples

LAYERS = st.lists(st.booleans(), min_size=8, max_size=8).filter(any)
#: Layers of the first of two stages, and ministages of both.
CUTS = st.sampled_from([(cut, count) for cut in range(2, 7) for count in range(2, min(cut, 8 - cut) + 1)])
KNOWN = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)])


def timed(windows, stages, **replica):
    """The job and the timing of stages of one GPU each, with these layers, ministages and recomputation."""
    model = dataclasses.replace(TINY, layers=len(windows), window=Window(64, tuple(windows)))
    job = tiny_job(model=model, global_batch_size=4)
    found, first = [], 0
    for number, (layers, ministages, recompute) in enumerate(stages):
        member = Member((number,), job.seq_length, (0, model.heads))
        domain = Domain((Group(((0, job.seq_length),), (member,)),))
        found.append(
            Stage((domain,), layers=(first, first + layers), recompute=recompute, ministages=ministages)
        )
        first += layers
    workload = dataclasses.replace(job.workload(), layers=len(windows))
    plan = Plan(workload, (Replica(tuple(found), **replica),))
    return job, plan, CostModel(job, KNOWN).timing(plan)


def layers_of(part, model):
    """Layers of each kind of one unit's part, and those that are computed again."""
    return [
        tuple(int(np.ravel(count)[0]) for count in (held.layers, held.again)) for held in part.of_kinds(model)
    ]


@given(LAYERS, CUTS, st.sampled_from(["interleaved", None]))
@examples(20)
def test_a_stage_has_the_layers_of_its_ministages(windows, cuts, order):
    cut, count = cuts
    job, plan, timing = timed(windows, [(cut, count, "full"), (8 - cut, count, "full")], order=order)
    model = job.model
    for stage, section in enumerate(timing.sections):
        own = [
            model.kind_of_layers[layer]
            for layers in plan.replicas[0].ministage_layers(stage)
            for layer in range(*layers)
        ]
        expected = [(own.count(kind),) * 2 for kind in range(len(model.kinds))]
        assert layers_of(section.part, model) == expected


@given(LAYERS)
@examples(10)
def test_some_layers_are_computed_again_also_beside_empty_ranges(windows):
    model = dataclasses.replace(TINY, layers=8, window=Window(64, tuple(windows)))
    part = ModelPart(5, 2, True, False, 1, ranges=((1, 6), (0, 0)))
    kinds = model.kind_of_layers
    expected = [(kinds[1:6].count(kind), kinds[1:3].count(kind)) for kind in range(len(model.kinds))]
    assert layers_of(part, model) == expected


def test_the_heavier_layers_of_one_ministage_are_kept_at_a_time():
    # The first ministage has all layers without a window, which keep as much as the others outside attention.
    model = dataclasses.replace(TINY, layers=4, window=Window(64, (False, False, True, True)))
    part = ModelPart(4, 0, True, True, 1, ministages=2, ranges=((0, 2), (2, 4)))
    assert part.at_once(model, [1, 1]) == pytest.approx(1 / 2)
    assert part.at_once(model, [3, 1]) == pytest.approx(3 / 4)
