"""Multi-token prediction in weights, time and memory: layers of the last stage, and further losses."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.proof import joint_bound
from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.cost.ceiling import ceiling_tokens_per_s
from megatron_hexi.cost.compute import device_speeds, logits_times
from megatron_hexi.cost.held_weights import HeldWeights
from megatron_hexi.cost.memory import part_params
from megatron_hexi.cost.throughput import model_flops
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.mesh import Mesh
from megatron_hexi.models import Model
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.moves.edit import written_out
from tests.support.costs import TINY, cluster, products_by_hand, tiny_job
from tests.support.plans import examples
from tests.unit.cost.test_kinds import LAYERS, MODES, NODES, one_stage, staged, with_window

PLAIN = cluster([("a", "PLAIN", 1)]).ranks[0].device
SHAPES = st.builds(
    dataclasses.replace,
    st.just(TINY),
    layers=st.integers(3, 7),
    kv_heads=st.just(2),
    tied_embeddings=st.booleans(),
    learned_positions=st.sampled_from([0, 4096]),
    norm_biases=st.booleans(),
    mtp_layers=st.integers(1, 3),
)


def without(model: Model) -> Model:
    return dataclasses.replace(model, mtp_layers=0)


def by_hand(model, tensor_parallel=1):
    """A block has the weights of DeepSeek-V3's report (arXiv 2412.19437, 2.2) and Megatron's last norm."""
    hidden = model.hidden_size
    norms = 3 * hidden * (2 if model.norm_biases else 1)
    layer = model.kinds[model.kind_of_layers[-1]].layer_params(tensor_parallel)
    return layer + hidden * 2 * hidden // tensor_parallel + norms


@given(SHAPES, st.data(), st.sampled_from([1, 2]))
@examples(30)
def test_the_last_stage_has_all_of_its_weights(model, data, width):
    cut = data.draw(st.integers(1, model.layers - 1))
    job = tiny_job(model=model, global_batch_size=2)
    plain = dataclasses.replace(job, model=without(model))
    plan, nodes = staged(job, (0, cut, model.layers)), cluster(NODES)
    sections = [CostModel(one, nodes).timing(plan).sections for one in (job, plain)]
    (first, last), (first_plain, last_plain) = [
        [
            float(np.max(part_params(dataclasses.replace(one.job, tensor_parallel=width), one.parts)))
            for one in own
        ]
        for own in sections
    ]
    assert first == first_plain
    positions = model.learned_positions * model.hidden_size
    # The stage embeds tokens: tied weights are there already.
    copy = positions + (0 if model.tied_embeddings else model.vocab_params(width))
    assert last - last_plain == model.mtp_layers * by_hand(model, width) + copy


@given(SHAPES, st.data())
@examples(20)
def test_boxes_of_weights_are_as_many(model, data):
    cuts = (0, data.draw(st.integers(1, model.layers - 1)), model.layers)
    job = tiny_job(model=model, global_batch_size=2)
    plan = staged(job, cuts)
    timing, mesh = CostModel(job, cluster(NODES)).timing(plan), Mesh(plan, 1, job.sequence_parallel)
    weights, held = HeldWeights(job, mesh), np.zeros(len(mesh.units))
    for bucket, _ in weights.buckets():
        for rank, whole, _ in weights.of(bucket):
            held[rank] += whole
    for section in timing.sections:
        assert held[section.ranks].max() == pytest.approx(float(np.max(part_params(job, section.parts))))


def test_what_a_single_stage_has_is_the_models_count():
    model = dataclasses.replace(TINY, mtp_layers=2)
    (section,) = (
        CostModel(tiny_job(model=model), cluster(NODES)).timing(one_stage(tiny_job(model=model))).sections
    )
    assert np.max(part_params(section.job, section.part)) == model.total_params + model.mtp_params


@given(LAYERS, MODES, st.integers(1, 2), st.sampled_from([100, 3000]))
@examples(20)
def test_it_takes_as_long_as_layers_and_losses_more(layers, recompute, predictions, size):
    """A block costs a layer of the last kind behind the model, and the loss once more with a projection."""
    nodes, model = cluster(NODES, latency=5), with_window(size, layers)
    longer = with_window(size, [*layers, *[layers[-1]] * predictions])

    def timed(shape):
        job = tiny_job(model=shape, recompute=recompute)
        (stage,) = CostModel(job, nodes).timing(one_stage(job)).stages
        return stage

    found = timed(dataclasses.replace(model, mtp_layers=predictions))
    plain, more = timed(model), timed(longer)
    assert [float(np.max(n)) for n in found.counts] == [float(np.max(n)) for n in more.counts]
    rows = np.array([1000.0])
    job = tiny_job(model=dataclasses.replace(model, mtp_layers=predictions))
    speeds = device_speeds(PLAIN, job)
    both, one = (float(np.sum(logits_times(speeds, of, rows))) for of in (job, tiny_job(model=model)))
    projection = sum(products_by_hand(1000, (2 * model.hidden_size, model.hidden_size)))
    assert both == pytest.approx((1 + predictions) * one + predictions * projection)
    assert np.all(found.last.busy > (1 + predictions) * plain.last.busy)
    losses = (found.last.busy - more.last.busy).max() if len(set(found.last.busy)) == 1 else None
    total, without_losses = found.replicas[0], more.replicas[0]
    assert total.total - total.logits == pytest.approx(without_losses.total - without_losses.logits)
    assert losses is None or losses > 0


@given(LAYERS, MODES, st.integers(1, 2))
@examples(20)
def test_memory_is_that_of_as_many_layers_more(layers, recompute, predictions):
    nodes, model = cluster(NODES), with_window(100, layers)
    longer = with_window(100, [*layers, *[layers[-1]] * predictions])

    def memory(shape):
        job = tiny_job(model=shape, recompute=recompute)
        return CostModel(job, nodes).timing(one_stage(job)).memory[0]

    found, more = memory(dataclasses.replace(model, mtp_layers=predictions)), memory(longer)
    assert found["attention"] == pytest.approx(more["attention"])
    # Inputs of norms and projection: five rows a block; one more where a block is computed again.
    rows = 5 if recompute != "full" else 1
    tokens = one_stage(tiny_job(model=model)).replicas[0].domain.members
    beside = np.array([one.tokens for one in tokens]) * predictions * rows * model.hidden_size * 2
    assert found["activations"] - more["activations"] == pytest.approx(beside)
    # What other losses keep, softmax in fp32 and rows around the norm, is there beside the loss.
    peak, alone = (terms["logits"] + terms["working_set"] for terms in (found, more))
    vocab = model.vocab_params() // model.hidden_size
    losses = np.array([one.tokens for one in tokens]) * predictions * (4 * vocab + 6 * model.hidden_size)
    is_loss = alone > more["working_set"]
    assert (peak - alone)[is_loss] == pytest.approx(losses[is_loss])


@given(LAYERS, MODES, st.booleans())
@examples(15)
def test_the_simulator_takes_as_long_as_the_cost_model(layers, recompute, in_stages):
    shape = dataclasses.replace(with_window(100, layers), mtp_layers=1)
    job = tiny_job(model=shape, recompute="none" if in_stages else recompute, global_batch_size=2)
    plan = staged(job, (0, 1, len(layers)), recompute) if in_stages else one_stage(job)
    nodes = cluster(NODES, 10**6)
    found, cost = simulate(plan, job, nodes), estimate(plan, job, nodes)
    assert found.iteration_s == pytest.approx(cost.iteration_s, rel=0.02)
    for rank, known in zip(found.ranks, cost.ranks, strict=True):
        assert rank.busy_s == pytest.approx(known.compute_s)


def test_it_counts_in_flops_and_in_the_ceiling():
    model = dataclasses.replace(TINY, mtp_layers=1)
    plain = tiny_job(model=TINY)
    vocab = model.hidden_size * (model.vocab_size + 2 * model.hidden_size)
    per_layer = (model_flops(TINY, 4096) - 6 * TINY.hidden_size * TINY.vocab_size) / TINY.layers
    assert model_flops(model, 4096) - model_flops(TINY, 4096) == pytest.approx(per_layer + 6 * vocab)
    job = dataclasses.replace(plain, model=model)
    assert ceiling_tokens_per_s(job, [PLAIN]) < ceiling_tokens_per_s(plain, [PLAIN])


def planned(model, nodes, **fixed):
    job = tiny_job(model=model, global_batch_size=8, **fixed)
    return find_plan(Request(job, frozenset(fixed)), nodes, with_baselines=True)


def test_the_planner_gives_the_last_stage_fewer_layers():
    nodes = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)])
    shape = dataclasses.replace(TINY, layers=12)
    counts = []
    for predictions in (0, 3):
        model = dataclasses.replace(shape, mtp_layers=predictions)
        found = planned(model, nodes, pipeline_parallel=2, data_parallel=1)
        (replica,) = found.plan.replicas
        counts.append([stage.layers[1] - stage.layers[0] for stage in replica.stages if stage.layers])
    assert sum(counts[1]) == 12
    assert counts[1][-1] < counts[0][-1] if counts[0] else counts[1][-1] < 6


@pytest.mark.parametrize("fixed", [{}, {"pipeline_parallel": 2}])
def test_a_plan_is_never_slower_than_megatrons_flags_nor_faster_than_the_bound(fixed):
    nodes = cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    model = dataclasses.replace(TINY, layers=4, mtp_layers=1)
    found = planned(model, nodes, **fixed)
    times = [one.trial.iteration_s for one in found.baselines if one.trial is not None]
    assert times
    assert found.cost.iteration_s <= min(times) * 1.002
    assert found.bound.iteration_s <= found.cost.iteration_s
    # Training takes it in stages with layers of their own, not in a pipeline of alike ones.
    assert not found.plan.is_repeated or found.job.pipeline_parallel == 1


@given(MODES, st.integers(1, 2))
@examples(10)
def test_any_layout_takes_at_least_the_bound(recompute, predictions):
    nodes = cluster(NODES, 10**6)
    model = dataclasses.replace(TINY, layers=4, kv_heads=2, mtp_layers=predictions)
    job = tiny_job(model=model, global_batch_size=2)
    bound = joint_bound(Request(job), nodes)
    for plan, of in (
        (one_stage(job), dataclasses.replace(job, recompute=recompute)),
        (staged(job, (0, 3, 4), recompute), job),
        (staged(job, (0, 1, 4), recompute), job),
    ):
        assert bound.iteration_s <= estimate(plan, of, nodes).iteration_s


def test_megatrons_pipeline_is_the_same_written_out():
    nodes = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], 10**6)
    job = tiny_job(model=dataclasses.replace(TINY, layers=4, mtp_layers=1), global_batch_size=4)
    repeated = dataclasses.replace(job, pipeline_parallel=2)
    plan = one_stage(repeated, ((1.0, 1.0),))
    before = Candidate(plan, repeated, CostModel(repeated, nodes).timing(plan))
    out, alone = written_out(plan, repeated)
    assert [stage.layers for stage in out.replicas[0].stages] == [(0, 2), (2, 4)]
    ranks = [[m.ranks for m in stage.domains[0].members] for stage in out.replicas[0].stages]
    assert ranks == [[(0,), (1,)], [(2,), (3,)]]
    after = Candidate(out, alone, CostModel(alone, nodes).timing(out))
    assert after.iteration_s == pytest.approx(before.iteration_s, rel=0.01)
