"""Plans whose stages have layers, units, samples and state of their own; equal ones cost as repeated ones."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cli import main as cli
from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import CostModel, Job, Phases, estimate, job_of_plan, presets
from megatron_hexi.cost.layer_bytes import token_activation_bytes
from megatron_hexi.cost.memory import FRAGMENTATION, RESERVE_BYTES
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.errors import ClusterError, PlanError
from megatron_hexi.lab.simulator import chrome_trace, simulate
from megatron_hexi.lab.simulator.pipeline_replay import replay_pipeline
from megatron_hexi.plan import (
    Domain,
    Group,
    JobTerms,
    Member,
    Plan,
    Replica,
    Stage,
    proportional_plan,
    read_plan,
    validate_plan,
    write_plan,
)
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.plans import examples

GB = 1e9
FAST = 1e6  # GB/s: a network that takes no time
DEEP = dataclasses.replace(TINY, layers=4, tied_embeddings=False)


def written_out(plan, job):
    """A plan whose one stage the job repeats, with each stage and its layers written down."""
    each = plan.units * job.tensor_parallel
    layers = job.stage_layers

    def stage(domain, number):
        groups = tuple(
            dataclasses.replace(
                group,
                members=tuple(
                    dataclasses.replace(one, ranks=tuple(rank + number * each for rank in one.ranks))
                    for one in group.members
                ),
            )
            for group in domain.groups
        )
        return Stage((Domain(groups),), layers=(number * layers, (number + 1) * layers))

    replicas = tuple(
        Replica(
            tuple(stage(replica.domain, number) for number in range(job.pipeline_parallel)),
            replica.micro_batches,
        )
        for replica in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas)


def whole(*ranks, samples=None, state=1, seq_length=4096, heads=4):
    """A domain of one unit."""
    member = Member(tuple(ranks), seq_length, (0, heads // len(ranks)), state)
    return Domain((Group(((0, seq_length),), (member,)),), samples)


def plan_of(job, *replicas, terms=None):
    """Replicas given as (micro-batches, stages), the stages as (layers, domains) and what else they say."""
    plan = Plan(
        job.workload(),
        tuple(
            Replica(
                tuple(Stage(tuple(domains), layers, *more) for layers, domains, *more in stages),
                micro_batches,
            )
            for micro_batches, stages in replicas
        ),
        job=terms or JobTerms(),
    )
    widths = {len(member.ranks) for member in plan.members}
    width = widths.pop() if len(widths) == 1 else 0
    plan = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, tensor_parallel=width))
    validate_plan(plan)
    return plan


@pytest.mark.parametrize("recompute", ["none", "selective", "full", 1])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_an_equal_layout_written_out_costs_the_same(pp, tp, recompute):
    job = tiny_job(
        model=DEEP,
        pipeline_parallel=pp,
        tensor_parallel=tp,
        recompute=recompute,
        data_parallel=2,
        global_batch_size=6,
        overlap_gradients=False,
    )
    plan = proportional_plan(job.workload(), [[[1, 2], [1]], [[2], [1]]])
    shares = zip(plan.replicas, (4, 2), strict=True)
    plan = dataclasses.replace(
        plan, replicas=tuple(dataclasses.replace(r, micro_batches=n) for r, n in shares)
    )
    # Each stage is a node, so that all but the sends between stages takes time.
    known = cluster(
        [(f"n{stage}", "DOUBLE" if stage % 2 else "PLAIN", plan.units * tp) for stage in range(pp)], FAST
    )
    before = estimate(plan, job, known)
    out = written_out(plan, job)
    found = estimate(out, dataclasses.replace(job, pipeline_parallel=1), known)
    assert found.iteration_s == pytest.approx(before.iteration_s, rel=1e-5)
    assert found.tokens_per_s == pytest.approx(before.tokens_per_s, rel=1e-5)
    for name, seconds in before.phases.by_name.items():
        assert found.phases.by_name[name] == pytest.approx(seconds, rel=1e-5, abs=1e-7)
    for mine, theirs in zip(found.ranks, before.ranks, strict=True):
        assert (mine.rank, mine.name, mine.stage) == (theirs.rank, theirs.name, theirs.stage)
        # The optimizer's state is cut between rows.
        assert mine.memory.terms == pytest.approx(theirs.memory.terms, rel=1e-4)
        assert mine.compute_s == pytest.approx(theirs.compute_s, rel=1e-5)


def test_gradients_and_weights_hide_behind_either_pass():
    job = tiny_job(data_parallel=2, global_batch_size=2)
    plan = proportional_plan(job.workload(), [[[1.0]], [[1.0]]])
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], bandwidth=3)
    out = written_out(plan, job)
    shown, hidden = (
        estimate(plan, dataclasses.replace(job, overlap_gradients=overlap), known).phases.gradients
        for overlap in (False, True)
    )
    params = 2 * TINY.layer_params() + TINY.vocab_params() + TINY.hidden_size
    weights = params * 2 / 2 / (3 * GB)  # half of two bytes each
    gradients = 2 * weights
    assert shown == pytest.approx(gradients + weights)
    assert hidden < shown
    timing = CostModel(job, known).timing(out)
    layer = timing.stages[0].layer
    free = [2 * float(way.finish.max()) for way in (layer.forward, layer.backward)]
    waits = [
        max(all_of_it / 2, all_of_it - behind)
        for all_of_it, behind in zip((weights, gradients), free, strict=True)
    ]
    assert timing.phases.gradients == pytest.approx(sum(waits), rel=1e-5)


@given(st.integers(1, 8), st.integers(1, 20))
@examples(50)
def test_equal_stages_idle_the_known_part_of_the_time(stages, micro_batches):
    # The bubble is (p - 1) / m of the work (Narayanan et al., arXiv 2104.04473, section 2.2).
    nothing = np.zeros(stages - 1)
    one = Pipeline((Phases(token=2.0, attention=1.0),) * stages, nothing, nothing, micro_batches)
    assert one.phases.total == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert one.phases.bubble / (one.phases.token + one.phases.attention) == pytest.approx(
        (stages - 1) / micro_batches
    )
    spans = replay_pipeline(one, [1.0] * stages, 0)
    assert max(span.end_s for span in spans) == pytest.approx(one.phases.total)


SHAPES = st.lists(st.tuples(st.floats(0.1, 1), st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=7)


@given(SHAPES, st.floats(0.2, 0.45), st.integers(1, 15))
@examples(150)
def test_the_closed_form_is_never_below_the_replay(shapes, forward, micro_batches):
    seconds = [shape[0] for shape in shapes]
    there, back = (np.array([shape[way] for shape in shapes[1:]]) for way in (1, 2))
    one = Pipeline(tuple(Phases(token=each) for each in seconds), there, back, micro_batches)
    spans = replay_pipeline(one, [forward * each for each in seconds], 0)
    end = max(span.end_s for span in spans)
    # The slowest stage works all the time; the first micro-batch passes everything.
    least = max(micro_batches * max(seconds), sum(seconds) + there.sum() + back.sum())
    assert least * (1 - 1e-9) <= end <= one.phases.total * (1 + 1e-9)
    # Each stage's steps follow each other, each needs the one beside, and 1F1B keeps few in flight.
    begun = {(span.stage, span.way, span.micro_batch): span.start_s for span in spans}
    done = {(span.stage, span.way, span.micro_batch): span.end_s for span in spans}
    for (stage, way, number), start in begun.items():
        if way == "forward" and stage > 0:
            assert start >= done[stage - 1, way, number] + there[stage - 1] - 1e-9
        if way == "backward" and stage < len(shapes) - 1:
            assert start >= done[stage + 1, way, number] + back[stage] - 1e-9
    for stage in range(len(shapes)):
        own = sorted((span for span in spans if span.stage == stage), key=lambda span: span.start_s)
        flight = np.cumsum([1 if span.way == "forward" else -1 for span in own])
        assert flight.max() == min(micro_batches, len(shapes) - stage)
        assert len(own) == 2 * micro_batches
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(own))


def test_sends_between_equal_stages_by_hand():
    # p micro-batches are in flight, and a way through and back takes p stages and 2 (p - 1) sends.
    stages, send = 4, 0.1
    one = Pipeline((Phases(token=1.0),) * stages, np.full(3, send), np.full(3, send), 100)
    period = (stages + 2 * (stages - 1) * send) / stages
    assert one.phases.total == pytest.approx(stages + 6 * send + 99 * period)
    end = max(span.end_s for span in replay_pipeline(one, [1 / 3] * stages, 0))
    assert end == pytest.approx(one.phases.total, rel=0.01)
    # Where the last stage waits anyhow, sends cost the first micro-batch only.
    early = Pipeline((Phases(token=1.0), Phases(token=0.5)), np.full(1, send), np.full(1, send), 100)
    assert early.phases.total == pytest.approx(1.5 + 2 * send + 99)
    # A border that is busy all the time sets the pace.
    thin = Pipeline((Phases(token=1.0),) * 2, np.full(1, 3.0), np.full(1, 0.1), 100)
    assert thin.phases.total == pytest.approx(2 + 3.1 + 99 * 3.0)


def test_unequal_stages_by_hand():
    # One layer on a plain GPU, three on one of twice its speed that has the output besides.
    job = tiny_job(model=DEEP, global_batch_size=4, overlap_gradients=False)
    known = cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1)], bandwidth=20)
    plan = plan_of(job, (4, [((0, 1), [whole(0)]), ((1, 4), [whole(1)])]))
    timing = CostModel(job, known).timing(plan)
    first, second = (
        count * float(cost.layer.forward.finish[0] + cost.layer.backward.finish[0])
        for count, cost in zip((1, 3), timing.stages, strict=True)
    )
    second += float(timing.stages[1].logits[0])
    send = 4096 * 512 * 2 / (20 * GB)
    assert first < second
    # In every row of neighbours the slow one sets the pace: (first + second + 2 sends) / 2 is less.
    assert first + 2 * send < second
    assert timing.phases.total - timing.phases.optimizer == pytest.approx(first + 4 * second + 2 * send)
    assert timing.phases.pipeline == pytest.approx(2 * send)
    assert timing.phases.bubble == pytest.approx(first)
    assert timing.phases.gradients == 0  # nobody holds the same


def test_replicas_of_any_depth_take_their_own_micro_batches():
    job = tiny_job(model=DEEP, data_parallel=2, global_batch_size=5, overlap_gradients=False)
    known = cluster([("a", "PLAIN", 3)])
    deep, flat = [((0, 2), [whole(0)]), ((2, 4), [whole(1)])], [((0, 4), [whole(2)])]
    few, many = (
        CostModel(job, known).timing(plan_of(job, (5 - count, deep), (count, flat))) for count in (1, 4)
    )
    assert [len(pipeline.stages) for pipeline in few.pipelines] == [2, 1]
    assert few.replicas[1].total - few.synchronisation[1] == pytest.approx(
        (many.replicas[1].total - many.synchronisation[1]) / 4
    )
    assert few.phases.bubble > 0 == many.phases.bubble  # now the flat one is waited for


def test_tensor_parallel_sums_are_the_unit_s_own():
    job = tiny_job(model=DEEP)
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 1)], bandwidth=FAST)
    plan = plan_of(job, (1, [((0, 3), [whole(0, 1)]), ((3, 4), [whole(2)])]))
    phases = estimate(plan, job, known).phases
    # Three layers of two sums each way in a unit of two, at 100 GB/s; the other unit has none.
    assert phases.tensor_parallel == pytest.approx(3 * 4 * 4096 * 512 * 2 / (100 * GB))


def test_state_is_shared_as_the_plan_says():
    job = tiny_job(global_batch_size=2, data_parallel=2, overlap_gradients=False)
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], bandwidth=10)
    plan = plan_of(job, (1, [((0, 2), [whole(0, state=3)])]), (1, [((0, 2), [whole(1)])]))
    cost = estimate(plan, job, known)
    params = 2 * TINY.layer_params() + TINY.vocab_params() + TINY.hidden_size
    assert [rank.memory.optimizer for rank in cost.ranks] == pytest.approx(
        [12 * params * 3 / 4, 12 * params / 4], rel=1e-5
    )
    # The owner of less sends (and gets) the most: three quarters of the buffer, 4 + 2 bytes.
    assert cost.phases.gradients == pytest.approx(params * 6 * 3 / 4 / (10 * GB), rel=1e-5)
    assert cost.ranks[0].optimizer_s > cost.ranks[1].optimizer_s


def test_sets_of_holders_follow_each_other_on_ranks_that_they_share():
    # Rank 2 holds what rank 0 and what rank 1 hold, so it reduces twice; each pair's halves at 10 GB/s.
    job = tiny_job(model=DEEP, global_batch_size=2, data_parallel=2, overlap_gradients=False)
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1), ("c", "PLAIN", 1)], bandwidth=10)
    plan = plan_of(job, (1, [((0, 2), [whole(0)]), ((2, 4), [whole(1)])]), (1, [((0, 4), [whole(2)])]))
    timing = CostModel(job, known).timing(plan)
    layers, vocabulary = DEEP.layer_params(), DEEP.vocab_params()
    each = [2 * layers + vocabulary + 512, 2 * layers + vocabulary]
    gradients = [4 * params / 2 / (10 * GB) for params in each]
    assert timing.synchronisation[1] == pytest.approx(1.5 * sum(gradients), rel=1e-5)
    # All sets are taken in one order, the last layers first.
    assert timing.synchronisation[0] == pytest.approx(1.5 * sum(gradients), rel=1e-5)
    # Unequal tensor parallelism: each rank of the unit shares a half with the other replica's one.
    wide = plan_of(job, (1, [((0, 4), [whole(0, 1)])]), (1, [((0, 4), [whole(2)])]))
    known = cluster([("a", "PLAIN", 2), ("c", "PLAIN", 1)], bandwidth=10)
    half = (4 * layers + 2 * vocabulary + 512) / 2
    assert CostModel(job, known).timing(wide).synchronisation[1] == pytest.approx(
        2 * 6 * half / 2 / (10 * GB),
        rel=2e-3,  # norms are on both ranks
    )


def test_tied_embeddings_are_one_weight_at_both_ends():
    tied = dataclasses.replace(DEEP, tied_embeddings=True)
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], bandwidth=10)
    waits = []
    for model in (tied, DEEP):
        job = tiny_job(model=model, overlap_gradients=False)
        plan = plan_of(job, (1, [((0, 2), [whole(0)]), ((2, 4), [whole(1)])]))
        waits.append(estimate(plan, job, known))
    assert waits[0].phases.gradients == pytest.approx(tied.vocab_params() * 6 / 2 / (10 * GB), rel=1e-5)
    assert waits[1].phases.gradients == 0
    assert waits[0].ranks[0].memory.weights == waits[1].ranks[0].memory.weights
    assert waits[0].ranks[0].memory.optimizer < waits[1].ranks[0].memory.optimizer


def test_memory_of_a_stage_by_hand():
    # Three stages of 2, 1 and 1 layers; the first recomputes one of its two and keeps three micro-batches.
    model = dataclasses.replace(DEEP, vocab_size=64 * 1024)  # so that the loss needs more than a layer
    job = tiny_job(model=model, global_batch_size=5)
    known = cluster([("a", "PLAIN", 3)])
    plan = plan_of(
        job,
        (5, [((0, 2), [whole(0)], 1), ((2, 3), [whole(1)], "full"), ((3, 4), [whole(2)], "none")]),
    )
    ranks = estimate(plan, job, known).ranks
    outside = 4096 * token_activation_bytes(job)
    inside = 4096 * (128 * 4 * 3 * 2 + 4 * 4)  # each alone: the output is the projection's input
    entry = 4096 * 512 * 2
    assert [rank.memory.activations for rank in ranks] == [3 * (outside + entry), 2 * entry, outside]
    assert [rank.memory.attention for rank in ranks] == [3 * inside, 0, inside]
    ends = model.vocab_params()
    each = model.layer_params()
    assert [rank.memory.weights for rank in ranks] == [
        2 * (2 * each + ends),
        2 * each,
        2 * (each + ends + 512),
    ]
    assert [rank.memory.logits > 0 for rank in ranks] == [False, False, True]
    for rank in ranks:
        memory = rank.memory
        moving = memory.activations + memory.attention + memory.working_set + memory.logits
        assert memory.reserve == RESERVE_BYTES + FRAGMENTATION * moving
        assert rank.compute_s + rank.communication_s + rank.idle_s == pytest.approx(
            ranks[0].compute_s + ranks[0].communication_s + ranks[0].idle_s
        )


def test_domains_share_samples():
    terms = JobTerms(micro_batch_size=4, global_batch_size=4)
    job = tiny_job(micro_batch_size=4, global_batch_size=4, overlap_gradients=False)
    plan = plan_of(job, (1, [((0, 2), [whole(0, samples=3), whole(1, samples=1)])]), terms=terms)
    known = cluster([("a", "PLAIN", 2)])
    three, one = estimate(plan, job, known).ranks
    # Gradients of weights are added up once, however many rows make them.
    assert 2.9 * one.token_s < three.token_s < 3 * one.token_s
    assert three.attention_s == pytest.approx(3 * one.attention_s)
    assert three.memory.activations == 3 * one.memory.activations
    assert one.idle_s > 0 == three.idle_s
    with pytest.raises(PlanError, match="--micro-batch-size 2: domains of the plan share 4 samples; give 4"):
        estimate(plan, dataclasses.replace(job, micro_batch_size=2), known)


def test_what_does_not_fit_the_plan_is_refused():
    job = tiny_job(model=DEEP)
    plan = plan_of(job, (1, [((0, 3), [whole(0, 1)]), ((3, 4), [whole(2)])]))
    said = "tensor-parallel unit of 2 has ranks [0, 1], which are a-0/0 to b-0/0, on two nodes; give it ranks"
    with pytest.raises(ClusterError, match=re.escape(said)):
        estimate(plan, job, cluster([("a", "PLAIN", 1), ("b", "PLAIN", 2)]))
    with pytest.raises(ClusterError, match=re.escape("has 2 GPUs, the plan is for 3 (3 ranks)")):
        estimate(plan, job, cluster([("a", "PLAIN", 2)]))
    with pytest.raises(
        PlanError, match="--pipeline-model-parallel-size 2: the plan has stages with layers of their own"
    ):
        estimate(plan, dataclasses.replace(job, pipeline_parallel=2), cluster([("a", "PLAIN", 3)]))


def test_the_job_is_as_the_plan_says_where_nothing_else_is_given():
    job = tiny_job(model=DEEP)
    terms = JobTerms(
        micro_batch_size=2,
        global_batch_size=6,
        precision="fp16",
        recompute="full",
        overlap_gradients=False,
        sequence_parallel=False,
    )
    plan = plan_of(job, (3, [((0, 4), [whole(0)])]), terms=terms)
    found = job_of_plan(plan, DEEP)
    for name in ("micro_batch_size", "global_batch_size", "precision", "recompute", "sequence_parallel"):
        assert getattr(found, name) == getattr(terms, name)
    assert not found.overlap_gradients
    assert found.distributed_optimizer
    given = job_of_plan(plan, DEEP, recompute="none", global_batch_size=12)
    assert (given.recompute, given.precision, given.global_batch_size) == ("none", "fp16", 12)


@st.composite
def stage_plans(draw):
    """A job and a plan of one or two replicas, each of one to three stages of one or two units."""
    job = tiny_job(
        model=DEEP,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        overlap_gradients=draw(st.booleans()),
        micro_batch_size=2,
        global_batch_size=2,
    )
    rank, replicas, taken = 0, [], 0
    for _ in range(draw(st.integers(1, 2))):
        cuts = sorted(draw(st.sets(st.integers(1, 3), max_size=2)))
        stages = []
        for layers in zip([0, *cuts], [*cuts, 4], strict=True):
            kind = draw(st.sampled_from(["one", "wide", "samples", "group"]))
            sizes = {"one": [1], "wide": [2], "samples": [1, 1], "group": [1, 1]}[kind]
            units = []
            for size in sizes:
                units.append(tuple(range(rank, rank + size)))
                rank += size
            if kind == "group":
                tokens = draw(st.integers(500, 3500))
                heads = draw(st.integers(1, 3))
                members = (Member(units[0], tokens, (0, heads)), Member(units[1], 4096 - tokens, (heads, 4)))
                domains = [Domain((Group(((0, 4096),), members),))]
            else:
                samples = 1 if kind == "samples" else None
                state = draw(st.integers(1, 3))
                domains = [whole(*unit, samples=samples, state=state) for unit in units]
            stages.append((layers, domains, draw(st.sampled_from([None, "none", "full", 1]))))
        count = draw(st.integers(1, 6))
        taken += count
        replicas.append((count, stages))
    batch = 2 * taken
    job = dataclasses.replace(job, data_parallel=len(replicas), global_batch_size=batch)
    terms = JobTerms(micro_batch_size=2, global_batch_size=batch)
    return job, plan_of(job, *replicas, terms=terms)


def machines(plan, bandwidth=10.0, gpu="PLAIN", per="gpu"):
    """Wide units need a node; all are on one, or each rank on its own where none is wide."""
    wide = any(len(member.ranks) > 1 for member in plan.members)
    nodes = [("a", gpu, plan.ranks)] if wide else [(f"n{n}", gpu, 1) for n in range(plan.ranks)]
    return cluster(nodes, bandwidth, per=per)


@given(stage_plans(), st.floats(1, 50), st.floats(1, 20))
@examples(60)
def test_more_bandwidth_and_faster_gpus_are_never_slower(case, bandwidth, factor):
    job, plan = case
    slow = estimate(plan, job, machines(plan, bandwidth))
    assert estimate(plan, job, machines(plan, bandwidth * factor)).iteration_s <= slow.iteration_s * (
        1 + 1e-9
    )
    assert estimate(plan, job, machines(plan, bandwidth, "DOUBLE")).iteration_s <= slow.iteration_s * (
        1 + 1e-9
    )
    assert slow.phases.total == pytest.approx(slow.iteration_s)
    assert slow.tokens_per_s <= slow.ceiling_tokens_per_s
    for rank in slow.ranks:
        assert rank.compute_s + rank.communication_s <= slow.iteration_s * (1 + 1e-9)


@given(stage_plans())
@examples(40)
def test_the_simulator_agrees(case):
    job, plan = case
    job, known = dataclasses.replace(job, overlap_gradients=False), machines(plan)
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    # Only stages that are not all waited for make a difference, and small ones.
    assert found.iteration_s - found.phases.bubble - found.phases.pipeline == pytest.approx(
        cost.iteration_s - cost.phases.bubble - cost.phases.pipeline, rel=0.02
    )
    assert 0.7 * cost.iteration_s <= found.iteration_s <= cost.iteration_s * (1 + 1e-9)
    assert found.phases.gradients == pytest.approx(cost.phases.gradients)
    for rank, model in zip(found.ranks, cost.ranks, strict=True):
        assert (rank.rank, rank.name, rank.stage, rank.unit) == (
            model.rank,
            model.name,
            model.stage,
            model.unit,
        )
        assert rank.busy_s == pytest.approx(model.compute_s)
        assert rank.busy_s + rank.communication_s + rank.idle_s == pytest.approx(found.iteration_s)


def test_the_trace_shows_every_micro_batch_in_its_stage():
    job = tiny_job(model=DEEP, data_parallel=2, global_batch_size=5)
    plan = plan_of(job, (3, [((0, 3), [whole(0)]), ((3, 4), [whole(1)])]), (2, [((0, 4), [whole(2)])]))
    found = simulate(plan, job, cluster([("a", "PLAIN", 3)]))
    assert len(found.pipeline) == 2 * 3 * 2 + 2 * 2
    assert (found.layers, found.stage_layers) == (3, 4)
    events = [event for event in chrome_trace(found)["traceEvents"] if event.get("cat") == "pipeline"]
    # The second replica has no pipeline to show.
    assert {event["pid"] for event in events} == {3}
    assert sorted((event["tid"], event["name"]) for event in events) == sorted(
        (stage, f"{way} {number}")
        for stage in (0, 1)
        for way in ("forward", "backward")
        for number in range(3)
    )


def test_commands_take_the_job_from_the_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    job = Job(presets()["gpt-7b"], 4096, global_batch_size=4)
    terms = JobTerms(micro_batch_size=2, global_batch_size=4, recompute="full", precision="bf16")
    stages = [((0, 20), [whole(0, heads=32)]), ((20, 32), [whole(1, samples=2, heads=32)])]
    path, machines_path = tmp_path / "plan.yaml", tmp_path / "cluster.yaml"
    write_plan(plan_of(job, (2, stages), terms=terms), path)
    machines_path.write_text(
        "name: two\nnodes:\n- {name: a, gpu: H200-SXM-141GB, gpus: 2}\n"
        "network: {bandwidth_gb_s: 25, latency_us: 5, per: gpu}\n"
    )
    asked = [str(path), "--cluster", str(machines_path), "--model", "gpt-7b", "--json"]
    found = {}
    for name in ("validate", "simulate"):
        monkeypatch.setattr("sys.argv", ["hexi", name, *asked])
        with pytest.raises(SystemExit) as done:
            cli.main()
        assert done.value.code in (0, None), capsys.readouterr().err
        found[name] = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("sys.argv", ["hexi", "validate", *asked, "--recompute-granularity", "none"])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    assert (
        "job.recompute is full, the command line has --recompute-granularity none" in capsys.readouterr().err
    )
    whole_job = dataclasses.replace(job, micro_batch_size=2, recompute="full")
    expected = estimate(read_plan(path), whole_job, read_cluster(machines_path))
    assert found["validate"]["estimate"]["iteration_s"] == pytest.approx(expected.iteration_s)
    assert found["simulate"]["model_iteration_s"] == pytest.approx(expected.iteration_s)
    assert found["simulate"]["stage_layers"] == 20


def test_plans_of_one_model_may_have_units_of_other_sizes_on_the_same_ranks():
    known = cluster([("a", "PLAIN", 4)], FAST)
    job = tiny_job(model=DEEP, global_batch_size=4)
    plans = []
    for width in (1, 2, 4):
        cut = dataclasses.replace(job, tensor_parallel=width)
        plan = proportional_plan(cut.workload(), [[[1.0] * (4 // width)]])
        plans.append(written_out(plan, cut))
    model = CostModel(job, known)
    together = [model.timing(plan).phases.total for plan in plans]
    assert together == [CostModel(job, known).timing(plan).phases.total for plan in plans]
    assert len(set(together)) == 3
