"""Replayed layers of several kinds, and tokens on their way to experts: by hand, and by the cost model."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.errors import ClusterError
from megatron_hexi.kinds import Experts, Latent, Window
from megatron_hexi.lab.simulator import chrome_trace, simulate
from megatron_hexi.lab.simulator.replay import replay_layers
from megatron_hexi.lab.simulator.timeline_picture import draw_timeline
from megatron_hexi.lab.simulator.unit_program import FROM_EXPERTS, TO_EXPERTS
from megatron_hexi.plan import Exchange, proportional_plan
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.expert_plans import expert_plan
from tests.support.plans import examples
from tests.support.replayed import sent_bytes
from tests.unit.cost.test_experts import EXPERTS, MIXED, SPARSE, one_stage, workload

FAST = 1e6  # GB/s: a network that takes no time
WINDOWS = dataclasses.replace(
    TINY, layers=6, window=Window(1024, layers=(True, True, False, True, True, False))
)
LATENT = dataclasses.replace(
    MIXED, layers=4, head_dim=192, latent=Latent(512, 64, 128), experts=Experts(EXPERTS, 2, 256, 0, True)
)


def random_case(seed, ranks, bandwidth=10):
    """A random plan whose units hold experts, its job, and a cluster of GPUs of two speeds."""
    drawn = random.Random(seed)
    shape = dataclasses.replace(workload(MIXED), tensor_parallel=0)
    plan = expert_plan(drawn, shape, 4, ranks, EXPERTS)
    shares = [one.micro_batches for one in plan.replicas]
    job = tiny_job(
        model=MIXED,
        micro_batch_size=4,
        global_batch_size=4 * sum(4 if share is None else share for share in shares),
        data_parallel=len(plan.replicas),
        recompute=drawn.choice(["none", "selective", "full"]),
        overlap_gradients=False,
    )
    known = cluster([("a", "PLAIN", ranks - ranks // 2), ("b", "PLAIN", ranks // 2)], bandwidth, per="gpu")
    try:
        estimate(plan, job, known)
    except ClusterError:  # a unit on two nodes
        known = cluster([("a", "PLAIN", ranks)], bandwidth)
    return plan, job, known


@given(st.integers(0, 10**6), st.integers(2, 8))
@examples(40)
def test_random_plans_with_experts_take_about_as_long_as_the_cost_model_says(seed, ranks):
    plan, job, known = random_case(seed, ranks)
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    assert found.phases.total == pytest.approx(found.iteration_s)
    # Stages hide behind each other while a pipeline fills; who is late at an all-to-all is waited for.
    assert 0.7 * cost.iteration_s <= found.iteration_s <= 1.1 * cost.iteration_s
    # Work is the model's; the rest of the time is communication and idleness.
    for rank, model in zip(found.ranks, cost.ranks, strict=True):
        assert rank.busy_s == pytest.approx(model.compute_s)
        assert rank.busy_s + rank.communication_s + rank.idle_s == pytest.approx(found.iteration_s)


@pytest.mark.parametrize("held", [((0, 5), (5, 8)), ((0, 8), (8, 8)), ((0, 4), (4, 8))])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_experts_alone_take_as_long_as_the_cost_model_says(held, recompute):
    """Equal tokens, so that only experts are waited for; equal GPUs and a card each."""
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], 5)
    plan = one_stage(SPARSE, (2048, 2048), held)
    job = tiny_job(model=SPARSE, recompute=recompute, overlap_gradients=False)
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    # A rank with less to do has its results back early: what travels then has the link to itself.
    assert found.iteration_s == pytest.approx(cost.iteration_s, rel=0.03)


def replayed(plan, job, known, kind=0):
    timing = CostModel(job, known).timing(plan)
    return timing, replay_layers(timing.sections, timing.stages, timing.experts, kind, known)


def test_tokens_travel_to_experts_and_back_by_hand():
    """1 GB/s each way, no latency: of 3072 and 1024 tokens go 3/8 and 5/8 to the other, each twice."""
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], 1)
    plan = one_stage(SPARSE, (3072, 1024), ((0, 5), (5, 8)))
    timing, (replay,) = replayed(plan, tiny_job(model=SPARSE), known)
    program, log = replay.whole.program, replay.whole.log
    there, back = (
        np.array([batch.carries == name for batch, _ in program.batches])
        for name in (TO_EXPERTS, FROM_EXPERTS)
    )
    first = {True: np.flatnonzero(there)[:2], False: np.flatnonzero(back)[:2]}
    sizes = 2 * 512 * 2 * np.array([3072 * 3 / 8, 1024 * 5 / 8])
    begin = timing.stages[0].layer.forward.token.max()  # a message starts when both ends are there
    assert log.arrived[first[True]] == pytest.approx(begin + sizes / 1e9)
    # Each computes once its rows are there; results leave when both have some, the way they came.
    experts = timing.stages[0].layer.forward.experts
    arrived = log.arrived[first[True]].max()
    assert log.left[first[False]] == pytest.approx(np.full(2, arrived + experts.max()))
    assert log.arrived[first[False]] == pytest.approx(arrived + experts.max() + sizes / 1e9)


@given(st.integers(0, 10**6), st.integers(2, 8))
@examples(30)
def test_every_row_that_goes_to_an_expert_comes_back(seed, ranks):
    plan, job, known = random_case(seed, ranks)
    timing = CostModel(job, known).timing(plan)
    for stage in {section.number for section in timing.sections}:
        own = [number for number, section in enumerate(timing.sections) if section.number == stage]
        for mode in {timing.sections[number].job.recompute for number in own}:
            alike = [number for number in own if timing.sections[number].job.recompute == mode]
            if not any(np.any(timing.sections[one].parts.of_kinds(MIXED)[1].layers) for one in alike):
                continue
            placed = {number: held for number in alike if (held := timing.experts[number]) is not None}
            found = replay_layers(
                [timing.sections[number] for number in alike],
                [timing.stages[number] for number in alike],
                [placed[number] for number in alike],
                1,
                known,
            )
            whole = found[0].whole
            assert np.isfinite(whole.log.arrived).all()
            sent, received = (
                sent_bytes(whole, "expert_all_to_all"),
                sent_bytes(whole, "expert_all_to_all", received=True),
            )
            # A pass's rows go there and come back, so that a unit sends as much as it receives.
            assert sent == pytest.approx(received)
            for number, replay in zip(alike, found, strict=True):
                section, held = timing.sections[number], placed[number]
                width = section.ranks.shape[1]
                rows = section.job.micro_batch_size * section.arrays.tokens / width
                # To all slots of its domain but the rank's own, and results of what comes to its own.
                slots = {
                    domain: sum(int(other.count[other.domain == domain].sum()) for other in placed.values())
                    for domain in held.domain.tolist()
                }
                domain_rows = held.domain_rows
                expected = np.zeros(len(rows))
                for unit, domain in enumerate(held.domain.tolist()):
                    for count in held.count[unit].tolist():
                        expected[unit] += rows[unit] * (slots[domain] - count)
                        expected[unit] += (domain_rows[unit] - rows[unit]) * count
                element = 2 * 512 * job.element_bytes / EXPERTS
                for lap, one in enumerate(whole.laps):
                    goes = one.work.is_whole and one.way != "logits"
                    assert sent[lap, replay.units] == pytest.approx(element * expected * goes)


@pytest.mark.parametrize("model", [WINDOWS, MIXED, LATENT], ids=["windows", "experts", "latent"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_layers_of_several_kinds_take_as_long_as_the_cost_model_says(model, recompute):
    known = cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], 100)
    job = tiny_job(model=model, seq_length=8192, recompute=recompute, overlap_gradients=False)
    if model.experts is None:
        plan = proportional_plan(job.workload(), [[[2.0, 2.0], [1.0, 1.0]]])
    else:
        plan = one_stage(model, (2730, 2730, 1366, 1366), ((0, 3), (3, 6), (6, 7), (7, 8)))
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    assert found.iteration_s == pytest.approx(cost.iteration_s, rel=0.05)
    assert found.kinds == tuple(dict.fromkeys(found.kinds))
    assert len(found.kinds) == len(model.kinds)
    assert {span.layer_kind for span in found.spans} == set(range(len(model.kinds)))


def test_each_kind_counts_as_often_as_it_has_layers():
    """One GPU: nobody waits, so the simulator has the cost model's time to the last digit."""
    known = cluster([("a", "PLAIN", 1)])
    for model in (WINDOWS, MIXED, LATENT):
        job = tiny_job(model=model, global_batch_size=3)
        plan = (
            one_stage(model, (4096,), ((0, EXPERTS),))
            if model.experts
            else proportional_plan(job.workload(), [[[1.0]]])
        )
        found, cost = simulate(plan, job, known), estimate(plan, job, known)
        for name, seconds in cost.phases.by_name.items():
            assert found.phases.by_name[name] == pytest.approx(seconds, rel=1e-9, abs=1e-15)


def test_stages_have_the_kinds_of_their_own_layers():
    """The first stage has the dense layer alone, which is not replayed with the experts of the second."""
    known = cluster([("a", "PLAIN", 2)], FAST)
    job = tiny_job(model=MIXED, global_batch_size=2)
    first, second = (one_stage(MIXED, (4096,), ((0, EXPERTS),), layers) for layers in ((0, 1), (1, 3)))
    stages = first.replicas[0].stages[0], second.replicas[0].stages[0]
    (domain,) = stages[1].domains
    (group,) = domain.groups
    moved = dataclasses.replace(group.members[0], ranks=(1,))
    domain = dataclasses.replace(domain, groups=(dataclasses.replace(group, members=(moved,)),))
    replica = dataclasses.replace(
        first.replicas[0],
        stages=(stages[0], dataclasses.replace(stages[1], domains=(domain,), exchange=Exchange(1, 1))),
        micro_batches=2,
    )
    plan = dataclasses.replace(first, replicas=(replica,))
    found = simulate(plan, job, known)
    kinds = {rank: {span.layer_kind for span in found.spans if span.rank == rank} for rank in (0, 1)}
    assert kinds == {0: {0}, 1: {1}}
    assert [rank.busy["experts"] > 0 for rank in found.ranks] == [False, True]
    titles = [axes.get_title(loc="left") for axes in draw_timeline(found, plan).axes]
    for way in ("forward", "backward"):
        assert {f"dense MLP, {way}", f"8 experts, {way}"} <= set(titles)
    events = [event for event in chrome_trace(found)["traceEvents"] if event["ph"] == "X"]
    assert {event["args"].get("kind") for event in events if event["pid"] == 1} == {"8 experts"}
