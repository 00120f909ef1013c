"""Re-planning: change points of a rank's history, plans cut anew, and what is worth a swap."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import HexiError
from megatron_hexi.kinds import DeltaNet, Experts
from megatron_hexi.lab.testbed.lab import Throttle, parse_throttle, speed_at
from megatron_hexi.models import Job, Model, read_model
from megatron_hexi.plan import (
    Domain,
    Exchange,
    Group,
    JobTerms,
    Member,
    Plan,
    Replica,
    Stage,
    dump_plan,
    validate_plan,
)
from megatron_hexi.plan.layout import causal_segments
from megatron_hexi.replan.planning.advisor import WINDOW, Advisor, RankHistory, answer
from megatron_hexi.replan.planning.recut import recut
from megatron_hexi.replan.training.plan_swap import grouping

TESTBED = Path(__file__).parents[3] / "scripts/testbed"
CLUSTER = read_cluster(TESTBED / "four-equal.yaml")
MODEL = read_model(str(TESTBED / "gpt-small.args"))
JOB = Job(MODEL, 16384, global_batch_size=1, precision="fp32")


def domain(ranks: list[int]) -> Domain:
    """Two groups of two."""
    half = JOB.seq_length // 2
    segments = causal_segments([half, half])
    groups = []
    for place, held in enumerate(segments):
        first, second = ranks[2 * place : 2 * place + 2]
        groups.append(
            Group(held, (Member((first,), half // 2, (0, 2)), Member((second,), half // 2, (2, 4))))
        )
    return Domain(tuple(groups))


PLAN = Plan(JOB.workload(), (Replica((Stage((domain([0, 1, 2, 3]),)),)),), exchange=Exchange(2))


def groups_of(plan: Plan) -> set[frozenset[int]]:
    return {frozenset(m.lead for m in g.members) for r in plan.replicas for g in r.domain.groups}


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02])
def test_a_new_level_is_found_in_a_window_and_only_then(noise):
    found = []
    for seed in range(50):
        draw, history = random.Random(seed), RankHistory()
        for number in range(100):
            level = 1.0 if number < 50 else 2.0
            if history.add(level * (1 + noise * draw.gauss(0, 1))):
                found.append(number)
        assert history.level == pytest.approx(2.0, rel=0.02)
    assert set(found) <= {50 + WINDOW - 2, 50 + WINDOW - 1}
    assert len(found) == 50


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_a_steady_rank_does_not_change_even_with_single_slow_iterations(noise):
    changes = 0
    for seed in range(20):
        draw, history = random.Random(seed), RankHistory()
        for number in range(200):
            slow = 3.0 if number % 23 in (7, 8) else 1.0
            changes += history.add(slow * (1 + noise * draw.gauss(0, 1)))
        assert history.level == pytest.approx(1.0, rel=0.03)
    assert changes <= 2  # of 4000 samples


@pytest.mark.parametrize("speeds", [{3: 0.5}, {0: 0.5}, {1: 0.7, 2: 0.4}])
def test_a_plan_cut_anew_keeps_groups_and_is_near_the_ceiling(speeds):
    cluster = CLUSTER.at_speeds(speeds)
    model = CostModel(JOB, cluster)
    new = recut(PLAN, JOB, cluster)
    validate_plan(new)
    assert groups_of(new) == groups_of(PLAN)
    even, best = CostModel(JOB, CLUSTER).timing(PLAN).phases.total, model.timing(new).phases.total
    total = sum(speeds.get(rank, 1.0) for rank in range(4))
    assert best < model.timing(PLAN).phases.total
    assert even * 4 / total / best > 0.85  # there are four heads to deal


def test_unequal_replicas_keep_their_shares_unless_they_may_move():
    job = replace(JOB, global_batch_size=3, data_parallel=2)
    whole = Group(
        ((0, JOB.seq_length),),
        (Member((2,), JOB.seq_length // 2, (0, 2)), Member((3,), JOB.seq_length // 2, (2, 4))),
    )
    other = Group(
        ((0, JOB.seq_length),),
        (Member((0,), JOB.seq_length // 2, (0, 2)), Member((1,), JOB.seq_length // 2, (2, 4))),
    )
    replicas = Replica((Stage((Domain((whole,)),)),), 2), Replica((Stage((Domain((other,)),)),), 1)
    plan = replace(PLAN, replicas=replicas)
    new = recut(plan, job, CLUSTER.at_speeds({2: 0.5}))
    validate_plan(new)
    assert groups_of(new) == groups_of(plan)
    assert [replica.micro_batches for replica in new.replicas] == [2, 1]
    slow, fast = new.replicas[0].domain.members
    assert fast.tokens > 1.5 * slow.tokens
    slower = CLUSTER.at_speeds({2: 0.25, 3: 0.25})
    moved = recut(plan, job, slower, shares=True)
    validate_plan(moved)
    assert groups_of(moved) == groups_of(plan)
    assert [replica.micro_batches for replica in moved.replicas] == [1, 2]
    kept, seconds = recut(plan, job, slower), CostModel(job, slower).timing
    assert seconds(moved).phases.total < 0.6 * seconds(kept).phases.total


def staged(samples: tuple[int, int], share: int = 2) -> Plan:
    """Four ranks: two stages, of ranks that share samples and of ranks that share sequences."""
    half = Group(
        ((0, 4096),), (Member((2,), 2048, (0, 2), state=3), Member((3,), 2048, (2, 4))), name="a group"
    )
    whole = [
        Domain((Group(((0, 4096),), (Member((rank,), 4096, (0, 4)),)),), samples[rank]) for rank in (0, 1)
    ]
    cut = MODEL.layers // 2
    stages = (
        Stage(tuple(whole), layers=(0, cut), recompute="none"),
        Stage((Domain((half,)),), layers=(cut, MODEL.layers), recompute="none"),
    )
    workload = replace(JOB, seq_length=4096).workload()
    return Plan(workload, (Replica(stages, share),), job=JobTerms(micro_batch_size=sum(samples)))


STAGED_JOB = replace(JOB, seq_length=4096, micro_batch_size=4, global_batch_size=8)


def test_the_order_of_ministages_stays():
    plan = staged((2, 2))
    (replica,) = plan.replicas
    stages = tuple(replace(stage, ministages=2) for stage in replica.stages)
    plan = replace(plan, replicas=(replace(replica, stages=stages, order="interleaved"),))
    new = recut(plan, STAGED_JOB, CLUSTER.at_speeds({3: 0.5}))
    assert new.members != plan.members
    assert grouping(new, True) == grouping(plan, True)


def kept(plan: Plan) -> list[object]:
    """All that a swap must leave as it is."""
    return [
        (
            *(
                replica.order,
                stage.layers,
                stage.recompute,
                len(stage.domains),
                stage.ministages,
                member.lead,
            ),
            *(member.state, group.name, frozenset(m.lead for m in group.members)),
        )
        for replica in plan.replicas
        for stage in replica.stages
        for domain in stage.domains
        for group in domain.groups
        for member in group.members
    ]


@pytest.mark.parametrize("speeds", [{}, {0: 0.5}, {3: 0.5}, {1: 0.4, 2: 0.7}])
@pytest.mark.parametrize("samples", [(2, 2), (1, 3)])
def test_stages_are_cut_anew_without_moving_weights(speeds, samples):
    plan, cluster = staged(samples), CLUSTER.at_speeds(speeds)
    model = CostModel(STAGED_JOB, cluster)
    new = recut(plan, STAGED_JOB, cluster)
    validate_plan(new)
    assert sorted(kept(new), key=str) == sorted(kept(plan), key=str)
    assert model.timing(new).phases.total <= model.timing(plan).phases.total
    one, other = (domain.samples or 0 for domain in new.replicas[0].stages[0].domains)
    slower = (speeds.get(0, 1.0) > speeds.get(1, 1.0)) - (speeds.get(0, 1.0) < speeds.get(1, 1.0))
    assert (one > other) - (one < other) == slower
    tokens = {member.lead: member.tokens for member in new.replicas[0].stages[1].members}
    assert (tokens[2] > 1.3 * tokens[3]) == (speeds.get(2, 1.0) > speeds.get(3, 1.0))


LAYER_KINDS = {
    "experts": replace(MODEL, experts=Experts(8, 2, 512, shared_ffn_hidden_size=256)),
    "prediction": replace(MODEL, mtp_layers=1),
    "states": replace(MODEL, state=DeltaNet(4, 128, 2, 128), pattern="G*G*"),
}


def with_experts(plan: Plan) -> Plan:
    """The plan with five of eight experts on the first rank of each stage, three on the other."""
    held = {0: ((0, 5),), 1: ((5, 8),), 2: ((0, 5),), 3: ((5, 8),)}

    def of_domain(domain: Domain) -> Domain:
        groups = (
            replace(group, members=tuple(replace(m, experts=held[m.lead]) for m in group.members))
            for group in domain.groups
        )
        return replace(domain, groups=tuple(groups))

    (replica,) = plan.replicas
    stages = (replace(stage, domains=tuple(map(of_domain, stage.domains))) for stage in replica.stages)
    workload = replace(plan.workload, experts=8)
    return replace(plan, replicas=(replace(replica, stages=tuple(stages)),), workload=workload)


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_kinds_of_layers_are_cut_anew(kind):
    model = Model(**json.loads(json.dumps(asdict(LAYER_KINDS[kind]))))  # as the planner's process reads it
    assert model == LAYER_KINDS[kind]
    job = replace(STAGED_JOB, model=model)
    plan = replace(staged((2, 2)), workload=job.workload())
    plan = with_experts(plan) if kind == "experts" else plan
    validate_plan(plan)
    cluster = CLUSTER.at_speeds({3: 0.5})
    new, timing = recut(plan, job, cluster), CostModel(job, cluster).timing
    validate_plan(new)
    assert grouping(new, True) == grouping(plan, True)
    tokens = {member.lead: member.tokens for member in new.replicas[0].stages[1].members}
    assert tokens[2] > 1.3 * tokens[3]
    assert timing(new).phases.total < 0.95 * timing(plan).phases.total


def test_where_only_layers_help_the_advice_says_what_a_restart_gains():
    middle = MODEL.layers // 2
    stages = [
        Stage((Domain((Group(((0, 4096),), (Member((rank,), 4096, (0, 4)),)),)),), layers=layers)
        for rank, layers in enumerate(((0, middle), (middle, MODEL.layers)))
    ]
    job = replace(STAGED_JOB, micro_batch_size=1)
    plan = Plan(replace(JOB, seq_length=4096).workload(), (Replica(tuple(stages), 8),), gpus=(0, 1))
    slow = [
        [rank.compute_s for rank in CostModel(job, CLUSTER.at_speeds({1: 0.5})).estimate(plan).ranks]
    ] * 10
    advice = Advisor(plan, job, CLUSTER, 0.03, 5).advise(10, slow, 0.1)
    assert advice.plan is None
    assert advice.restart is not None
    layers = [sum(stage.ministage_sizes) for stage in advice.restart.replicas[0].stages]
    assert layers[0] > layers[1]
    assert advice.restart_s < 0.9 * advice.present_s
    assert answer(advice)["restart"] == " + ".join(map(str, layers))
    assert answer(advice)["moved"] is None
    # A round with them must pay back its start within twenty intervals of five iterations.
    pays = 100 * (advice.best_s - advice.restart_s)
    for start_s, moved in ((0.9 * pays, dump_plan(advice.restart)), (1.1 * pays, None)):
        assert answer(Advisor(plan, job, CLUSTER, 0.03, 5).advise(10, slow, 0.1, start_s))["moved"] == moved
    even = [[rank.compute_s for rank in CostModel(job, CLUSTER).estimate(plan).ranks]] * 10
    assert Advisor(plan, job, CLUSTER, 0.03, 5).advise(10, even, 0.1).restart is None


def test_the_advisor_swaps_for_a_throttle_and_back_and_never_on_a_steady_cluster():
    draw = random.Random(0)
    advisor = Advisor(PLAN, JOB, CLUSTER, 0.03, 5)

    def measured(plan: Plan, speeds: dict[int, float], iterations: int = 5) -> list[list[float]]:
        ranks = CostModel(JOB, CLUSTER.at_speeds(speeds)).estimate(plan).ranks
        return [[rank.compute_s * (1 + 0.01 * draw.gauss(0, 1)) for rank in ranks] for _ in range(iterations)]

    plan, swaps = PLAN, []
    for iteration in range(5, 151, 5):
        speeds = {3: 0.5} if 60 < iteration <= 100 else {}
        advice = advisor.advise(iteration, measured(plan, speeds), 0.1)
        if advice.plan is not None:
            swaps.append(iteration)
            plan = advice.plan
            advisor.swapped(plan)
    assert len(swaps) == 2
    assert 60 < swaps[0] <= 70
    assert 100 < swaps[1] <= 110
    assert CostModel(JOB, CLUSTER).timing(plan).phases.total == pytest.approx(
        CostModel(JOB, CLUSTER).timing(PLAN).phases.total, rel=0.03
    )


def test_a_small_gain_or_one_that_does_not_pay_back_is_no_reason():
    ranks = CostModel(JOB, CLUSTER).estimate(PLAN).ranks
    slow = [[rank.compute_s * (2 if rank.rank == 3 else 1) for rank in ranks]] * 10
    assert Advisor(PLAN, JOB, CLUSTER, 0.03, 5).advise(10, slow, 0.1).plan is not None
    assert "threshold" in Advisor(PLAN, JOB, CLUSTER, 0.9, 5).advise(10, slow, 0.1).reason
    assert "pay back" in Advisor(PLAN, JOB, CLUSTER, 0.03, 5).advise(10, slow, 1e6).reason


def test_the_process_answers_line_by_line_and_says_what_is_wrong():
    job = {name: value for name, value in asdict(JOB).items() if name not in ("model", "kernel")}
    opening = {
        "plan": dump_plan(PLAN),
        "cluster": str(TESTBED / "four-equal.yaml"),
        "threshold": 0.03,
        "interval": 5,
        "packed": False,
        "shares": False,
        "model": asdict(MODEL),
        "job": job,
    }
    ranks = CostModel(JOB, CLUSTER).estimate(PLAN).ranks
    slow = [[rank.compute_s * (2 if rank.rank == 3 else 1) for rank in ranks]] * 10
    report = {"iteration": 10, "busy_s": slow, "swap_s": 0.1, "start_s": None, "swapped": None}
    wrong = opening | {"job": job | {"seq_length": 8}}
    for documents, key in (([opening, report], "reason"), ([wrong], "error")):
        text = "".join(json.dumps(document) + "\n" for document in documents)
        ended = subprocess.run(
            [sys.executable, "-m", "megatron_hexi.replan.planning.advisor"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        assert key in json.loads(ended.stdout.splitlines()[-1])


def test_throttles_are_read_and_hold():
    assert parse_throttle("2=0.5@60..180", 4) == Throttle(2, 0.5, 60, 180)
    both = (parse_throttle("2=.5@60..", 4), Throttle(2, 0.5, 100, 120))
    assert [speed_at(both, second) for second in (0, 60, 110, 130)] == [1, 0.5, 0.25, 0.5]


@pytest.mark.parametrize(
    "text", ["", "4=0.5@1..2", "1=0@1..2", "1=2@1..2", "1=0.5@2..1", "1=0.5", "x=0.5@1..2"]
)
def test_a_wrong_throttle_is_refused(text):
    with pytest.raises(HexiError, match="write GPU=SPEED@BEGIN"):
        parse_throttle(text, 4)
