"""Plans whose stages have layers, units, samples and state of their own; equal ones cost as repeated ones."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, Phases, estimate
from megatron_hexi.cost.layer_bytes import token_activation_bytes
from megatron_hexi.cost.memory import FRAGMENTATION, RESERVE_BYTES
from megatron_hexi.cost.once import replica_waits
from megatron_hexi.errors import ClusterError, PlanError
from megatron_hexi.models import job_of_plan
from megatron_hexi.plan import (
    JobTerms,
    proportional_plan,
)
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.pass_graph import end_of_1f1b
from tests.support.pipelines import pipeline_of
from tests.support.plans import examples
from tests.support.written_stages import DEEP, FAST, plan_of, whole, written_out

GB = 1e9


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
    phases = (Phases(token=2.0, attention=1.0),) * stages
    one = pipeline_of(phases, [1.0] * stages, nothing, nothing, micro_batches)
    assert one.phases.total == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert one.phases.bubble / (one.phases.token + one.phases.attention) == pytest.approx(
        (stages - 1) / micro_batches
    )
    for name, seconds in one.phases_of_passes.by_name.items():
        assert seconds == pytest.approx(getattr(one.phases, name), abs=1e-9)


SHAPES = st.lists(st.tuples(st.floats(0.1, 1), st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=7)


@given(SHAPES, st.floats(0.2, 0.45), st.integers(1, 15))
@examples(150)
def test_the_closed_form_is_never_below_the_passes(shapes, forward, micro_batches):
    seconds = [shape[0] for shape in shapes]
    there, back = (np.array([shape[way] for shape in shapes[1:]]) for way in (1, 2))
    phases, ahead = ([Phases(token=each) for each in seconds], [forward * each for each in seconds])
    one = pipeline_of(phases, ahead, there, back, micro_batches)
    spans, end = one.spans(), one.seconds()
    assert end == max(span.end_s for span in spans) == pytest.approx(end_of_1f1b(one))
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
    sends = [send] * 3
    one = pipeline_of((Phases(token=1.0),) * stages, [1 / 3] * stages, sends, sends, 100)
    period = (stages + 2 * (stages - 1) * send) / stages
    assert one.phases.total == pytest.approx(stages + 6 * send + 99 * period)
    assert one.seconds() == pytest.approx(one.phases.total, rel=0.01)
    # Where the last stage waits anyhow, sends cost the first micro-batch only.
    early = pipeline_of((Phases(token=1.0), Phases(token=0.5)), [0.4, 0.2], [send], [send], 100)
    assert early.phases.total == pytest.approx(1.5 + 2 * send + 99)
    # A border that is busy all the time sets the pace.
    thin = pipeline_of((Phases(token=1.0),) * 2, [0.4] * 2, [3.0], [0.1], 100)
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
    second += float(timing.stages[1].last.busy[0])
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
    assert [len(pipeline.stage_phases) for pipeline in few.pipelines] == [2, 1]
    assert few.replicas[1].total == pytest.approx(many.replicas[1].total / 4)
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
    assert replica_waits(timing.once, 2)[1] == pytest.approx(1.5 * sum(gradients), rel=1e-5)
    # All sets are taken in one order, the last layers first.
    assert replica_waits(timing.once, 2)[0] == pytest.approx(1.5 * sum(gradients), rel=1e-5)
    # Unequal tensor parallelism: each rank of the unit shares a half with the other replica's one.
    wide = plan_of(job, (1, [((0, 4), [whole(0, 1)])]), (1, [((0, 4), [whole(2)])]))
    known = cluster([("a", "PLAIN", 2), ("c", "PLAIN", 1)], bandwidth=10)
    half = (4 * layers + 2 * vocabulary + 512) / 2
    assert replica_waits(CostModel(job, known).timing(wide).once, 2)[1] == pytest.approx(
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
    said = "tensor-parallel unit of 2 has ranks [0, 1], which span two nodes (a-0/0 to b-0/0); give it ranks"
    with pytest.raises(ClusterError, match=re.escape(said)):
        estimate(plan, job, cluster([("a", "PLAIN", 1), ("b", "PLAIN", 2)]))
    with pytest.raises(ClusterError, match=re.escape("has 2 GPUs, but the plan is for 3 (3 ranks)")):
        estimate(plan, job, cluster([("a", "PLAIN", 2)]))
    with pytest.raises(
        PlanError, match="--pipeline-model-parallel-size 2: the plan's stages have layers of their own"
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
