"""What plans may use: options, defaults of a cluster file, and what a plan gains by each feature."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_hexi.cluster import PlannerRules, cluster_digest
from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import has_equal_replicas
from megatron_hexi.planner import Request, ablate_features, find_plan
from megatron_hexi.planner.features import USES, features_of, is_allowed
from megatron_hexi.planner.joint import packing
from megatron_hexi.planner.joint.pipes import Pipe, PipeStage
from megatron_hexi.planner.joint.pools import StageShape
from megatron_hexi.planner.joint.replica_columns import Column
from tests.support.fleets import read_text

MIXED = """\
name: mixed
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 2}
- {name: l40s, gpu: L40S-48GB, gpus: 2}
network: {bandwidth_gb_s: 5}
"""
#: Where a plan needs ministages and offload.
SMALL = """\
name: small
nodes:
- {name: a10g, gpu: A10G-24GB, gpus: 4}
"""
FEATURES = tuple(USES)


def request_of(model, length, **terms):
    return Request(Job(read_model(model), length, global_batch_size=8), **terms)


@pytest.fixture(scope="module")
def plans():
    """For each fleet, job and feature: the plan that may use anything, and the one that may not use it.

    Of the second fleet only features that its plan uses.
    """
    found: list[tuple[str, Any, Any]] = []
    for text, request in (
        (MIXED, request_of("gpt-3b", 16384)),
        (SMALL, request_of("gpt-3b", 32768)),
    ):
        known = read_text(text)
        free = find_plan(request, known)
        for feature in FEATURES if not found else features_of(free.plan):
            rules = PlannerRules(**{feature: False})
            try:
                kept = find_plan(replace(request, rules=rules), known)
            except NothingFitsError:
                kept = None
            found.append((feature, free, kept))
    return found


def test_plans_keep_to_the_rules(plans):
    for feature, _, kept in plans:
        if kept is not None:
            assert not USES[feature](kept.plan)
            assert feature not in features_of(kept.plan)


def test_a_rule_makes_no_plan_faster(plans):
    for feature, free, kept in plans:
        if kept is not None:
            assert kept.cost.iteration_s >= free.cost.iteration_s * (1 - 0.002), feature
            assert feature in features_of(free.plan) or kept.cost.iteration_s == free.cost.iteration_s


def test_every_feature_is_used_by_some_plan_and_refused_to_it(plans):
    used = {name for _, free, _ in plans for name in features_of(free.plan)}
    assert {"unequal_stages", "offload", "ministages"} <= used


def test_plans_without_unequal_stages_are_megatron_s_own_pipelines(plans):
    for feature, _, kept in plans:
        if feature == "unequal_stages" and kept is not None:
            assert kept.plan.is_repeated


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_replicas_are_equal_where_they_must_be(replicas):
    job = Job(read_model("gpt-3b"), 16384, global_batch_size=8, data_parallel=replicas)
    request = Request(job, frozenset({"data_parallel"}), rules=PlannerRules(unequal_replicas=False))
    planned = find_plan(request, read_text(MIXED.replace("gpus: 2", "gpus: 4")))
    plan = planned.plan
    assert len(plan.replicas) == replicas
    assert is_allowed(plan, planned.job, request)
    assert len({replica.micro_batches for replica in plan.replicas}) == 1
    assert not plan.is_repeated or has_equal_replicas(plan)


def test_equal_replicas_are_the_best_column_taken_several_times():
    def column(gpus, seconds):
        stage = PipeStage(StageShape((gpus,), 1), 1, "none", seconds)
        return Column((gpus,), Pipe((stage,), (), 1, True), 1, 0.0)

    slow, fast = column(1, 4.0), column(2, 1.5)
    packed = packing.pack([slow, fast], 8, (4,), range(1, 5), equal=True)
    assert packed is not None
    assert (packed.columns, packed.micro_batches, packed.seconds) == ((fast, fast), (4, 4), 6.0)
    # Three replicas cannot have equal shares of eight, nor does the fleet hold two pairs and a third.
    assert packing.pack([slow, fast], 8, (4,), range(3, 4), equal=True) is None
    four = packing.pack([slow, fast], 8, (4,), range(4, 5), equal=True)
    assert four is not None
    assert four.columns == (slow,) * 4
    assert packing.pack([slow, fast], 8, (4,), range(1, 5), most_s=5.0, equal=True) is None


# Where they come from


def test_a_cluster_file_has_defaults_that_the_command_line_overrides():
    text = f"{MIXED}planner: {{unequal_stages: false}}\n"
    known = read_text(text)
    assert find_plan(request_of("gpt-3b", 16384), known).plan.is_repeated
    own = PlannerRules(unequal_stages=True)
    assert not find_plan(request_of("gpt-3b", 16384, rules=own), known).plan.is_repeated
    # The machines are the same.
    assert cluster_digest(known) == cluster_digest(read_text(MIXED))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("planner: {ministage: false}", "planner.ministage is not a known field"),
        ("planner: {offload: 1}", "planner.offload"),
        ("planner: yes please", "planner"),
    ],
)
def test_other_rules_are_refused_by_name(line, words):
    with pytest.raises(HexiError, match=words):
        read_text(f"{MIXED}{line}\n")


def test_rules_over_others():
    rules = PlannerRules(ministages=True, offload=False).over(PlannerRules(False, True, False))
    assert rules == PlannerRules(True, False, False, None)
    assert rules.refused == ("offload", "unequal_replicas")
    assert rules.allow("unequal_stages")


# What a plan gains by them


def test_gains_are_those_over_the_plan_without_each_feature(plans):
    planned = plans[0][1]
    found = ablate_features(request_of("gpt-3b", 16384), read_text(MIXED), planned.plan)
    gains = {gain.feature: gain.tokens_per_s_without for gain in found}
    kept = {feature: one for feature, free, one in plans if free is planned}
    assert gains == {name: kept[name].cost.tokens_per_s for name in features_of(planned.plan)}
    assert "unequal_stages" in gains


# The context-parallel size


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2))])
def test_a_fixed_context_parallel_size_is_every_stage_s(size):
    request = replace(request_of("gpt-3b", 16384), context_parallel=size)
    plan = find_plan(request, read_text(MIXED)).plan
    for replica in plan.replicas:
        for stage in replica.stages:
            assert [len(domain.members) for domain in stage.domains] == [size]


def test_where_nothing_fits_an_allowed_feature_is_proposed():
    request = request_of("gpt-13b", 32768, rules=PlannerRules(offload=False, ministages=False))
    known = read_text(SMALL)
    try:
        find_plan(replace(request, rules=PlannerRules()), known)
    except NothingFitsError:
        pytest.skip("the job does not fit with all features either")
    with pytest.raises(
        NothingFitsError, match=r"--no-ministages --no-offload: .*fits: .*--(offload|ministages)"
    ):
        find_plan(request, known)
