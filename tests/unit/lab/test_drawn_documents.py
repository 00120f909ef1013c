"""Iterations of random documents: against pipelines timed sequence by sequence, and without differences."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, estimate, unit_rates
from megatron_hexi.cost.lanes import Lane
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.lab.simulator import draw_documents
from megatron_hexi.lab.simulator.drawn_documents import SEED
from megatron_hexi.models import Documents, read_documents
from megatron_hexi.models.documents import DocumentClass
from megatron_hexi.plan import proportional_plan
from megatron_hexi.plan.batch_balance import even_seconds, packed_domain, unit_seconds
from tests.support.costs import cluster, tiny_job
from tests.support.pass_graph import end_of_1f1b
from tests.support.plans import RANDOMS, examples

TEXT = "lognormal:300,1.2,4096"


def case(shape, batch, dealt=False, **changes):
    """A job of documents with its plan and a cluster of two kinds of GPUs."""
    documents = dataclasses.replace(read_documents(TEXT), dealt=dealt)
    job = tiny_job(global_batch_size=batch, documents=documents, data_parallel=len(shape), **changes)
    plan = proportional_plan(job.workload(), shape)
    count = plan.units * job.pipeline_parallel
    known = cluster([("a", "DOUBLE", count // 2), ("b", "PLAIN", count - count // 2)])
    if dealt:
        plan = dataclasses.replace(
            plan, rates=unit_rates(plan, dataclasses.replace(job, documents=None), known)
        )
    return plan, job, known


@pytest.mark.parametrize("stages", [1, 2])
def test_documents_that_are_all_alike_change_nothing(stages):
    plan, job, known = case([[[2.0], [1.0]]], 8, pipeline_parallel=stages)
    job = dataclasses.replace(job, documents=Documents((1024,), (1.0,)))
    drawn = draw_documents(plan, job, known)
    # The closed form of 1F1B is an upper bound.
    assert drawn.iterations_s == pytest.approx([estimate(plan, job, known).iteration_s] * 8, rel=3e-3)
    assert drawn.imbalance == pytest.approx(0)


class Exactly(Documents):
    """The pieces of one sequence."""

    def classes(self, seq_length):
        parts = zip(self.lengths, self.counts, strict=True)
        return tuple(DocumentClass(length * count / seq_length, float(length)) for length, count in parts)


def test_replicas_wait_for_the_one_with_the_longest_documents():
    plan, job, _ = case([[[1.0], [1.0]]] * 2, 4, overlap_gradients=False)
    known = cluster([("a", "PLAIN", 4)])
    drawn = draw_documents(plan, job, known)
    sequences = itertools.islice(job.documents.drawn(4096, SEED), 4 * len(drawn.iterations_s))
    expected = []
    for batch in itertools.batched(sequences, 4):
        # Each sequence is timed by itself, by its own pieces.
        exact = [
            Exactly(tuple(sorted(set(pieces))), tuple(pieces.count(one) for one in sorted(set(pieces))))
            for pieces in batch
        ]
        timed = [CostModel(dataclasses.replace(job, documents=one), known).timing(plan) for one in exact]
        first, second = timed[:2], timed[2:]
        passes = max(
            sum(one.pipelines[replica].stage_phases[0].total for one in own)
            for replica, own in enumerate((first, second))
        )
        timing = timed[0]
        once = timing.phases.total - timing.phases.spread - timing.replicas[0].total
        expected.append((passes + once, timing.phases.spread))
    seconds = [total for total, _ in expected]
    assert list(np.argsort(drawn.iterations_s)) == list(np.argsort(seconds))
    assert drawn.iterations_s == pytest.approx([sum(both) for both in expected], rel=0.01)
    assert drawn.imbalance > 0.005


@given(st.integers(1, 4), st.integers(1, 2), RANDOMS)
@examples(60)
def test_a_pipeline_of_unlike_micro_batches_is_timed_pass_by_pass(depth, chunks, random):
    count = depth * random.randint(1, 4)
    phases = [Phases(token=random.uniform(1, 3), logits=0.2) for _ in range(depth)]
    lanes = tuple((Lane(tuple(range(count)), one, 0.3 * one.token),) for one in phases)
    borders = np.full((depth if chunks > 1 else depth - 1, count), random.choice([0.0, 0.4]))
    parts = np.full((depth, chunks), 1 / chunks)
    weights = tuple(random.uniform(0.2, 3) for _ in range(count))
    pipeline = Pipeline(lanes, borders, borders, parts, weights=weights)
    assert pipeline.seconds() == pytest.approx(end_of_1f1b(pipeline))
    assert pipeline.phases.total == pytest.approx(pipeline.seconds())
    alike = dataclasses.replace(pipeline, weights=(1.0,) * count)
    assert alike.seconds() == dataclasses.replace(pipeline, weights=None).seconds()


def test_dealt_documents_take_as_long_as_the_slowest_unit_by_the_plan_s_rates():
    plan, job, known = case([[[2.0], [2.0], [1.0], [1.0]]], 8, dealt=True)
    drawn = draw_documents(plan, job, known)
    assert -0.01 < drawn.imbalance < 0.03
    # Where no unit has memory for other shares than the plan's, each batch is cut as without dealing.
    full = dataclasses.replace(plan.rates, room=tuple(0 for _ in plan.rates.room))
    stuck = draw_documents(dataclasses.replace(plan, rates=full), job, known)
    domain = plan.replicas[0].domain
    drawn_s = list(itertools.islice(job.documents.drawn(4096, SEED), 8 * len(stuck.iterations_s)))
    slowest = [max(unit_seconds(packed_domain(domain, one), one, full)) for one in drawn_s]
    factor = np.mean(slowest) / np.mean([even_seconds(domain, one, full) for one in drawn_s])
    (phases,) = CostModel(job, known).timing(plan).pipelines[0].stage_phases
    more = 8 * (factor - 1) * (phases.total - phases.communication)
    assert stuck.mean_s - estimate(plan, job, known).iteration_s == pytest.approx(more, rel=0.1)
    assert stuck.mean_s > drawn.mean_s


def test_the_same_seed_draws_the_same():
    plan, job, known = case([[[1.0], [1.0]]], 4)
    first, second, other = (draw_documents(plan, job, known, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first.iterations_s != other.iterations_s


@pytest.mark.parametrize("bandwidth", [0.3, 1, 3, 10])
def test_the_mean_of_random_sequences_takes_as_long_as_the_mean_sequence(bandwidth):
    # At some of these, attention hides the exchange of sequences with long documents, and not of others.
    plan, job, _ = case([[[1.0], [1.0], [1.0]]], 32)
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1), ("c", "PLAIN", 1)], bandwidth)
    drawn = draw_documents(plan, job, known)
    assert drawn.even_s == pytest.approx(estimate(plan, job, known).iteration_s, rel=0.01)
    assert drawn.mean_s == pytest.approx(drawn.even_s, rel=1e-3)
