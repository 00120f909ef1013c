"""Plans of models with experts: where experts are, and never slower than Megatron's flags."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_hexi.cluster import PlannerRules
from megatron_hexi.cost import CostModel
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.memory import Holdings, part_memory, part_params
from megatron_hexi.cost.memory_terms import sum_terms
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.errors import HexiError
from megatron_hexi.kinds import Experts
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.models import Model, job_of_plan
from megatron_hexi.plan import Domain, Group, Member, validate_plan
from megatron_hexi.plan.units import expert_domains, rank_gpus
from megatron_hexi.planner import find_plan
from megatron_hexi.planner.baselines import find_baselines, find_faster
from megatron_hexi.planner.baselines.flags import Floor
from megatron_hexi.planner.expert_placement import ExpertRule, expert_rules, placement, spread_experts
from megatron_hexi.planner.features import USES, means_of
from megatron_hexi.planner.joint.stage_tables import static_bytes
from megatron_hexi.planner.request import Request
from megatron_hexi.report.planned import expert_lines
from tests.support.baselines import expert_layout
from tests.support.costs import cluster, tiny_job
from tests.support.plans import examples

TOTAL = 16
#: A dense layer and two with experts, most of whose weights are theirs.
MODEL = Model(
    name="sparse",
    layers=3,
    hidden_size=1024,
    heads=8,
    kv_heads=4,
    head_dim=128,
    ffn_hidden_size=4096,
    gated=True,
    vocab_size=1024,
    tied_embeddings=False,
    experts=Experts(TOTAL, 2, 2048, layers=(False, True, True)),
)
JOB = tiny_job(model=MODEL, seq_length=16384, global_batch_size=8)
MIXED = cluster([("fast", "DOUBLE", 2), ("slow", "PLAIN", 2)], 50)


def held(plan):
    """For each stage of each replica, the ranges of experts of each expert domain, ascending."""
    return [
        [sorted(each.experts for each in domain if each.count) for domain in expert_domains(stage, TOTAL)]
        for replica in plan.replicas
        for stage in replica.stages
    ]


@pytest.fixture(scope="module")
def planned():
    return find_plan(Request(JOB), MIXED, with_baselines=True)


def test_a_plan_says_where_experts_are_and_costs_what_it_was_planned_for(planned):
    validate_plan(planned.plan)
    assert planned.plan.workload.experts == TOTAL
    for domain in itertools.chain.from_iterable(held(planned.plan)):
        # Every expert once, in order.
        assert [start for start, _ in domain] == [0, *(stop for _, stop in domain)][:-1]
        assert domain[-1][1] == TOTAL
    job = job_of_plan(planned.plan, MODEL)
    assert CostModel(job, MIXED).timing(planned.plan).phases.total == pytest.approx(planned.cost.iteration_s)
    assert planned.cost.fits


def test_a_plan_is_never_slower_than_megatrons_flags_nor_faster_than_the_bound(planned):
    assert [one.name for one in planned.baselines] == ["expert-parallel", "homogeneous"]
    for equal in planned.baselines:
        assert equal.trial is not None
        assert "EP" in equal.layout
        assert planned.cost.iteration_s <= equal.trial.iteration_s * 1.002
        devices = {MIXED.ranks[gpu].device.name for gpu in rank_gpus(equal.trial.plan, len(MIXED.ranks))}
        assert (len(devices) == 1) == (equal.name == "homogeneous")
        assert ("DOUBLE alone: " in equal.layout) == (equal.name == "homogeneous")
        left_out = ("2 GPUs left out",) if equal.name == "homogeneous" else ()
        assert means_of(equal.trial.plan, MIXED) == left_out
    assert planned.bound.iteration_s <= planned.cost.iteration_s


def test_a_report_says_how_many_experts_each_gpu_holds(planned):
    (line,) = expert_lines(planned.plan, MIXED)
    assert line.startswith("experts: of 16 in a layer ")
    assert "on a DOUBLE" in line


def test_the_simulator_replays_the_plan(planned):
    simulated = simulate(planned.plan, job_of_plan(planned.plan, MODEL), MIXED)
    assert simulated.iteration_s == pytest.approx(planned.cost.iteration_s, rel=0.05)


def test_equal_experts_can_be_asked_for(planned):
    rules = PlannerRules(unequal_experts=False)
    equal = find_plan(Request(JOB, rules=rules), MIXED)
    for domain in itertools.chain.from_iterable(held(equal.plan)):
        assert len({stop - start for start, stop in domain}) == 1
    assert not USES["unequal_experts"](equal.plan)
    assert equal.cost.iteration_s >= planned.cost.iteration_s * (1 - 0.002)


def test_faster_gpus_hold_more_experts():
    """On links that take no time one expert domain of all GPUs is best, with experts by their speed."""
    plan, _ = expert_layout(JOB, MIXED, 1, 1, 4, 4, 1).plan(JOB, 1)
    (stage,) = plan.replicas[0].stages
    (domain,) = spread_experts(stage.domains, TOTAL, None, lambda rank: 2.0 if rank < 2 else 1.0)
    counts = [stop - start for m in domain.members for start, stop in m.experts or ()]
    assert sum(counts) == TOTAL
    assert counts[0] == counts[1] in (5, 6)
    assert counts[2] + counts[3] == TOTAL - 2 * counts[0]
    even, uneven = (
        CostModel(JOB, cluster([("fast", "DOUBLE", 2), ("slow", "PLAIN", 2)], 1e6))
        .timing(dataclasses.replace(plan, replicas=(dataclasses.replace(plan.replicas[0], stages=(each,)),)))
        .stages[0]
        .kinds[1]
        .forward
        for each in (stage, dataclasses.replace(stage, domains=(domain,)))
    )
    assert (uneven.experts + uneven.expert_wait).max() < 0.8 * (even.experts + even.expert_wait).max()


@pytest.mark.parametrize(
    ("flags", "replicas", "domains", "expert_ranks"),
    [
        ((1, 1, 2, 2, 1), 4, 1, 2),
        ((1, 1, 2, 4, 2), 2, 2, 4),  # two replicas of Megatron's are one of ours
        ((2, 1, 2, 8, 2), 1, 2, 8),
        ((2, 1, 1, 2, 1), 4, 1, 2),
    ],
)
def test_equal_layouts_are_megatrons(flags, replicas, domains, expert_ranks):
    layout = expert_layout(JOB, cluster([("fast", "DOUBLE", 8)]), *flags)
    plan, job = layout.plan(layout.fleet.job, 1)
    validate_plan(plan)
    assert job.micro_batch_size == domains
    assert len(plan.replicas) == replicas
    assert all(len(stage.domains) == domains for stage in plan.stages)
    assert plan.members[-1].ranks[-1] == 7
    for of_stage in held(plan):
        for domain in of_stage:
            assert len(domain) == expert_ranks
            assert {stop - start for start, stop in domain} == {TOTAL // expert_ranks}


def test_what_is_fixed_stays_in_equal_layouts():
    request = Request(dataclasses.replace(JOB, tensor_parallel=2), fixed=frozenset({"tensor_parallel"}))
    best, trials = find_faster(request, MIXED, math.inf)
    assert best is not None
    assert trials > 0
    assert all(len(member.ranks) == 2 for member in best.plan.members)
    equal, _ = find_baselines(request, MIXED)[0]
    assert equal.layout.startswith("TP 2, PP 1, ")


def test_equal_layouts_are_tried_on_the_gpus_of_each_model_alone():
    """Slow GPUs that hold fast ones up by more than their share of the work are left out."""
    uneven = cluster([("fast", "DOUBLE", 4), ("slow", "PLAIN", 2)], 50)
    best, _ = find_faster(Request(JOB), uneven, math.inf)
    assert best is not None
    assert best.plan.gpus == (0, 1, 2, 3)
    _, homogeneous = find_baselines(Request(JOB), uneven)[0]
    assert homogeneous.layout.startswith("4 DOUBLE alone: TP ")
    alone, _ = find_faster(Request(JOB), uneven.without({1}), math.inf)
    assert alone is not None
    assert alone.iteration_s == pytest.approx(best.iteration_s)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sizes", [(1, 1, 4, 4, 1), (2, 1, 2, 4, 2), (1, 1, 1, 2, 1), (1, 3, 2, 2, 2)])
@pytest.mark.parametrize("kinds", [("DOUBLE",), ("DOUBLE", "PLAIN")])
def test_the_floor_of_an_equal_layout_is_below_its_time(recompute, sizes, kinds):
    """And its least memory is below what it needs: no layout that fits is passed over."""
    width, depth, context, expert, _ = sizes
    each = depth * max(width * context, expert) // len(kinds)
    on = cluster([(kind, kind, each) for kind in kinds], 5)
    layout = expert_layout(JOB, on, *sizes)
    asked = dataclasses.replace(layout.fleet.job, recompute=recompute)
    plan, job = layout.plan(asked, 1)
    timing, floor = CostModel(job, on).timing(plan), Floor([layout])
    assert 0.3 * timing.phases.total < floor.seconds(asked)[0] <= timing.phases.total
    assert 0.5 * timing.fullness < floor.fullness(asked)[0] <= timing.fullness


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_a_fixed_expert_parallel_size_is_every_expert_domain_s_and_no_faster_than_a_free_one(planned, size):
    fixed = find_plan(Request(JOB, expert_parallel=size), MIXED)
    validate_plan(fixed.plan)
    for replica in fixed.plan.replicas:
        for stage in replica.stages:
            assert {len(domain) for domain in expert_domains(stage, TOTAL)} == {size}
    assert planned.cost.iteration_s <= 1.002 * fixed.cost.iteration_s


@pytest.mark.parametrize(
    ("job", "fixed", "size", "message"),
    [
        ({}, {}, 8, "a stage of 4 GPUs is the largest"),
        ({}, {"pipeline_parallel": 2}, 4, "a stage of 2 GPUs is the largest"),
        ({}, {"tensor_parallel": 2}, 3, "whole units of --tensor-model-parallel-size 2"),
        ({}, {}, 0, "give a number above 0"),
        ({"model": dataclasses.replace(MODEL, experts=None)}, {}, 2, "sparse has no experts"),
    ],
)
def test_sizes_of_expert_domains_that_no_layout_has_are_refused(job, fixed, size, message):
    job = dataclasses.replace(JOB, **job, **fixed)
    with pytest.raises(HexiError, match=f"--expert-model-parallel-size {size}: .*{message}"):
        find_plan(Request(job, frozenset(fixed), expert_parallel=size), MIXED)


def test_places_of_experts_that_are_tried():
    """By speed in whole stages, by memory where GPUs differ in it for their speed, in nodes and alone."""
    assert expert_rules(JOB, MIXED) == [
        ExpertRule(),
        ExpertRule(None, "memory"),
        ExpertRule(2),
        ExpertRule(1),
    ]
    huge = dataclasses.replace(MODEL, experts=Experts(TOTAL, 2, 2**20, layers=(False, True, True)))
    assert ExpertRule(1) not in expert_rules(dataclasses.replace(JOB, model=huge), MIXED)
    assert expert_rules(dataclasses.replace(JOB, model=dataclasses.replace(MODEL, experts=None)), MIXED) == [
        ExpertRule()
    ]


@given(
    st.integers(1, 6),
    st.sampled_from([1, 2]),
    st.integers(1, 40),
    st.lists(
        st.builds(
            ExpertRule, st.sampled_from([None, 1, 2, 4, 8]), st.sampled_from(["speed", "memory", "equal"])
        ),
        min_size=2,
        max_size=4,
    ),
    st.booleans(),
)
@examples(60)
def test_rules_with_one_key_place_experts_alike(units, width, total, rules, is_mixed):
    """So what is known of a stage under one of them holds under the others."""
    weights = {"speed": (312.5, 98.1), "memory": (79.3, 44.7), "equal": (1.0, 1.0)}
    assume(len({placement(rule, units, width, is_mixed=is_mixed) for rule in rules}) == 1)
    ranks = [tuple(range(unit * width, (unit + 1) * width)) for unit in range(units)]
    domain = Domain((Group(((0, units),), tuple(Member(own, 1, (0, 1)) for own in ranks)),))

    def placed(rule):
        return spread_experts(
            [domain], total, rule.domain_size, lambda rank: weights[rule.by][rank % 2 if is_mixed else 0]
        )

    assert all(placed(rule) == placed(rules[0]) for rule in rules)


def test_a_stage_s_table_counts_all_memory_that_does_not_depend_on_tokens():
    job, counts = dataclasses.replace(JOB, distributed_optimizer=False), np.array([4.0, 6.5])
    part = ModelPart(layers=3, again=3, is_first=True, is_last=True, ahead=1)
    tokens, once = np.ones(2), np.ones(2, dtype=np.int64)
    holdings = Holdings(tokens, tokens, tokens, tokens, once, Flights(tokens, tokens), experts=counts)
    terms = part_memory(job, part, holdings, 1, part_params(job, part, counts))
    always = sum_terms(terms, "always") - terms["reserve"]
    found = static_bytes(job, part, counts[:, None], np.zeros((2, 1)), np.array(4), np.array(2))
    assert found.ravel() == pytest.approx(always)
