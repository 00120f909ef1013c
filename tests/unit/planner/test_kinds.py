"""Plans of models whose layers have windows, some or all, or latent attention."""

import dataclasses

import pytest

from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.kinds import Latent, Window
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.models import Job, Model
from megatron_hexi.plan import Plan, proportional_plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.layouts.trial import Candidate
from megatron_hexi.planner.moves import Climb, layer_moves, sample_moves
from megatron_hexi.report.planned import layer_lines
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import read_text
from tests.unit.cost.test_kinds import NODES, model, staged, with_window

FLEET = """\
name: mixed
nodes:
- {name: new, gpu: H100-SXM-80GB, gpus: 2}
- {name: old, gpu: A100-SXM-80GB, gpus: 2}
network: {bandwidth_gb_s: 25, latency_us: 10, per: gpu}
"""
#: Sliding windows in three of four layers; in all; latent attention.
SOME = Model(
    *("some", 8, 2048, 16, 8, 128, 8192, True, 64_000, False),
    qk_norm=True,
    post_norms=True,
    window=Window(1024, (True, True, True, False) * 2),
)
ALL = dataclasses.replace(SOME, name="all", window=Window(4096), post_norms=False)
LATENT = dataclasses.replace(
    ALL,
    name="latent",
    head_dim=192,
    kv_heads=16,
    qk_norm=False,
    window=None,
    latent=Latent(512, 64, 128, 768),
)


@pytest.mark.parametrize("length", [pytest.param(8192, marks=pytest.mark.slow), 65536])
@pytest.mark.parametrize("shape", [SOME, ALL, LATENT], ids=lambda shape: shape.name)
def test_no_layout_of_megatrons_flags_is_faster_than_the_plan(shape, length):
    known = read_text(FLEET)
    planned = find_plan(Request(Job(shape, length, global_batch_size=8)), known, with_baselines=True)
    again = estimate(planned.plan, planned.job, known)
    assert again.iteration_s == pytest.approx(planned.cost.iteration_s, rel=1e-12)
    assert again.fits
    assert planned.bound.iteration_s <= planned.cost.iteration_s
    equal = [one.tokens_per_s for one in planned.baselines if one.tokens_per_s is not None]
    assert equal
    assert planned.cost.tokens_per_s >= max(equal) / 1.002


@pytest.mark.parametrize("begin", [1, 4, 7])
def test_layers_move_to_where_no_single_step_is_faster(begin):
    nodes = cluster(NODES)
    job = tiny_job(model=with_window(64, [True] * 5 + [False] * 3), global_batch_size=4)
    costs = CostModel(job, nodes)

    def candidate(middle):
        plan = staged(job, (0, middle, 8))
        return Candidate(plan, job, costs.timing(plan))

    moved = Climb([layer_moves], lambda _job: costs).best(candidate(begin), 50)
    best = min((candidate(middle) for middle in range(1, 8)), key=lambda one: one.order)
    assert moved.iteration_s == pytest.approx(best.iteration_s)


@pytest.mark.parametrize("recompute", ["none", "selective", "full", 2])
def test_a_bound_of_moved_layers_has_all_but_the_gradients_of_the_moved_stages(recompute):
    nodes = cluster([*NODES, ("c", "PLAIN", 2)], latency=5)
    job = tiny_job(model=with_window(64, [True] * 5 + [False] * 4), global_batch_size=4)
    costs, plan = CostModel(job, nodes), staged(job, (0, 2, 5, 9), recompute)
    moves = list(layer_moves(Candidate(plan, job, costs.timing(plan))))
    assert len(moves) > 6
    for move in moves:
        timing = costs.timing(move.plan)
        moved = Candidate(move.plan, job, timing)
        excess, seconds = move.least
        assert excess <= moved.excess
        assert timing.pipelines[0].phases.total * (1 - 1e-12) <= seconds <= moved.iteration_s * (1 + 1e-12)


def test_layers_move_between_stages_in_ministages_that_keep_a_layer_each():
    nodes = cluster(NODES)
    job = tiny_job(model=model(8), global_batch_size=4)
    (replica,) = staged(job, (0, 5, 8)).replicas
    cut = tuple(dataclasses.replace(stage, ministages=3) for stage in replica.stages)
    plan = Plan(job.workload(), (dataclasses.replace(replica, stages=cut),))
    moves = list(layer_moves(Candidate(plan, job, CostModel(job, nodes).timing(plan))))
    # The last stage's three layers are as few as its ministages; one kind of layer moves by one.
    assert [[stage.layers for stage in move.plan.stages] for move in moves] == [[(0, 4), (4, 8)]]
    assert [[stage.ministage_sizes for stage in move.plan.stages] for move in moves] == [
        [(2, 1, 1), (2, 1, 1)]
    ]


def test_micro_batches_of_stages_of_one_unit_grow():
    nodes = cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1)])
    job = tiny_job(model=model(4), global_batch_size=12, data_parallel=2)
    plan = proportional_plan(job.workload(), [[[1.0]], [[1.0]]])
    plan = dataclasses.replace(
        plan,
        replicas=tuple(
            dataclasses.replace(replica, micro_batches=count)
            for replica, count in zip(plan.replicas, (4, 8), strict=True)
        ),
    )
    moves = list(sample_moves(Candidate(plan, job, CostModel(job, nodes).timing(plan))))
    counts = [[replica.micro_batches for replica in move.plan.replicas] for move in moves]
    # Of eight no whole micro-batches are left for the first replica's four samples.
    assert dict(zip([move.job.micro_batch_size for move in moves], counts, strict=True)) == {
        2: [2, 4],
        4: [1, 2],
    }
    assert all(len(replica.stages[0].domains) == 1 for move in moves for replica in move.plan.replicas)


def test_the_report_names_kinds_of_layers():
    assert layer_lines(SOME) == ["layers: 6 with window of 1,024, 2 with full attention"]
    assert layer_lines(ALL) == []


@pytest.mark.parametrize("size", [64, 1000, 4096])
def test_the_simulator_replays_windows_as_the_cost_model_times_them(size):
    nodes = cluster(NODES, bandwidth=100)
    job = tiny_job(model=model(4, window=Window(size)))
    plan = proportional_plan(job.workload(), [[[1.0, 2.0], [2.0, 1.0]]])
    simulated, expected = simulate(plan, job, nodes), estimate(plan, job, nodes)
    assert simulated.iteration_s == pytest.approx(expected.iteration_s, rel=0.05)


@pytest.mark.parametrize(("bandwidth", "travel"), [(10, True), (1000, False)])
def test_latent_columns_travel_where_the_network_is_slow(bandwidth, travel):
    nodes = "".join(f"- {{name: {name}, gpu: H100-SXM-80GB, gpus: 1}}\n" for name in "ab")
    network = f"network: {{bandwidth_gb_s: {bandwidth}, latency_us: 10, per: gpu}}\n"
    known = read_text(f"name: two\nnodes:\n{nodes}{network}")
    job = Job(dataclasses.replace(LATENT, layers=2), 65536, global_batch_size=1)
    planned = find_plan(Request(job), known)
    assert (planned.plan.workload.latent_exchange is not None) is travel
    again = estimate(planned.plan, planned.job, known)
    assert again.iteration_s == pytest.approx(planned.cost.iteration_s, rel=1e-12)
    assert planned.bound.iteration_s <= planned.cost.iteration_s


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(model(4, sinks=True), id="sinks"),
        pytest.param(dataclasses.replace(LATENT, layers=4), id="latent"),
    ],
)
def test_the_simulator_times_sinks_and_latent_attention(shape):
    nodes = cluster(NODES, bandwidth=100)
    job = tiny_job(model=shape)
    plan = proportional_plan(job.workload(), [[[1.0, 2.0], [2.0, 1.0]]])
    simulated, expected = simulate(plan, job, nodes), estimate(plan, job, nodes)
    assert simulated.iteration_s == pytest.approx(expected.iteration_s, rel=0.05)
