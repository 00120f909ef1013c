"""The bound of one GPU and of pipelines, where what is lost is known."""

import dataclasses
import itertools
from random import Random

import pytest

from benchmarks.proof import joint_bound, memory_fits
from megatron_hexi.cost import CostModel
from megatron_hexi.cost.memory import GIB
from megatron_hexi.plan import (
    Replica,
    Stage,
    proportional_plan,
    validate_plan,
)
from megatron_hexi.planner.request import Request
from tests.support.costs import cluster, tiny_job
from tests.support.stage_plans import job_plan
from tests.unit.benchmarks.test_proof import DEEP, FAST, LOOSER, just_enough, one_group


def cost_of(job, known, *stages, recompute="none"):
    """One replica of stages of whole units, given as (layers, ranks)."""
    replica = Replica(
        tuple(
            Stage((one_group([(ranks, job.seq_length)], job.model.heads // len(ranks)),), layers=layers)
            for layers, ranks in stages
        ),
        job.global_batch_size,
    )
    plan = job_plan(job.workload(), [replica], 1)
    return CostModel(dataclasses.replace(job, recompute=recompute), known).estimate(plan)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("gpu", "length", "sharp"),
    [("PLAIN", 2**16, 0.995), ("H100-SXM-80GB", 2**15, 0.8), ("L40S-48GB", 2**14, 0.7)],
)
def test_one_gpu_takes_as_long_as_the_bound(gpu, length, sharp, recompute):
    # PLAIN has one rate at all sizes, and work enough that the optimizer's step is nothing; on the others the
    # host's calls, of which the bound knows nothing, are shorter than kernels.
    job = tiny_job(model=DEEP, global_batch_size=3, recompute=recompute, seq_length=length)
    known = cluster([("a", gpu, 1)])
    cost = cost_of(job, known, ((0, 4), (0,)), recompute=recompute)
    bound = joint_bound(Request(job, frozenset(["recompute", "micro_batch_size"])), known)
    assert sharp * cost.iteration_s <= bound.iteration_s <= cost.iteration_s


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_gpu_needs_as_much_memory_as_a_layer_in_ministages(recompute):
    job = tiny_job(model=DEEP, recompute=recompute, seq_length=2**16)
    request = Request(job, frozenset(["recompute"]))
    (rank,) = cost_of(job, cluster([("a", "PLAIN", 1)]), ((0, 4), (0,)), recompute=recompute).ranks
    terms = rank.memory.terms
    # What a layer of four keeps and works with, the loss, and what libraries and the allocator keep.
    layer = (terms["activations"] + terms["attention"]) / 4 + terms["working_set"] + terms["logits"]
    least = (1.05 * layer + 1.5 * GIB) / GIB
    enough, little = (
        cluster([("a", f"PLAIN, memory_gb: {gib * 80 / 64}", 1)])
        for gib in (rank.memory_gib * (1 + 1e-9), least)
    )
    assert memory_fits(request, enough)
    assert not memory_fits(request, little)


@pytest.mark.parametrize(("depth", "sharp"), [(2, 0.93), (4, 0.88)])
def test_a_pipeline_fills_and_drains(depth, sharp):
    model = dataclasses.replace(DEEP, vocab_size=128)  # hardly any logits: stages take the same
    job = tiny_job(model=model, global_batch_size=16, pipeline_parallel=depth, seq_length=16384)
    known = cluster([("a", "PLAIN", depth)], FAST)
    each = 4 // depth
    stages = [((number * each, (number + 1) * each), (number,)) for number in range(depth)]
    cost = cost_of(dataclasses.replace(job, pipeline_parallel=1), known, *stages)
    fixed = Request(job, frozenset(["pipeline_parallel", "data_parallel"]), virtual_stages=1)
    bound = joint_bound(fixed, known)
    assert sharp * cost.iteration_s <= bound.iteration_s <= cost.iteration_s
    assert "pipelines" in bound.reason


@pytest.mark.parametrize("seed", range(12))
def test_no_interleaved_pipeline_beats_it(seed):
    random = Random(seed)
    depth, chunks = random.choice([2, 3, 4]), random.choice([2, 3, 4])
    model = dataclasses.replace(DEEP, layers=depth * chunks * random.choice([1, 2]), vocab_size=128)
    job = tiny_job(
        model=model,
        seq_length=random.choice([2048, 16384]),
        pipeline_parallel=depth,
        virtual_stages=chunks,
        global_batch_size=depth * random.choice([1, 2, 8]),
    )
    plan = proportional_plan(job.workload(), [[[1.0]]])
    known = just_enough(plan, job, [("a", "PLAIN", depth)], random.choice([50, FAST]))
    cost = CostModel(job, known).estimate(plan)
    free = dataclasses.replace(job, virtual_stages=1)
    depths = frozenset(["pipeline_parallel", "data_parallel"])
    for request in (
        Request(free),
        Request(free, virtual_stages=chunks),
        Request(free, depths),
        Request(free, depths, virtual_stages=chunks),
    ):
        assert memory_fits(request, known)
        bound = joint_bound(request, known, LOOSER * cost.iteration_s)
        assert bound.iteration_s <= cost.iteration_s * (1 + 1e-9), request


def interleaved_stages(random):
    """Return a plan of unequal stages of a GPU each, any ministages interleaved, its job and nodes."""
    depth, count = random.choice([2, 3, 4]), random.choice([2, 3])
    speeds = [random.choice([1, 1, 2]) for _ in range(depth)]
    sizes = [tuple(speed * random.choice([1, 1, 1, 2]) for _ in range(count)) for speed in speeds]
    ends = list(itertools.accumulate(map(sum, sizes), initial=0))
    model = dataclasses.replace(DEEP, layers=ends[-1], vocab_size=128)
    batch = random.randint(depth, 2 * depth)
    job = tiny_job(model=model, seq_length=2**16, global_batch_size=batch)
    stages = tuple(
        Stage((one_group([((rank,), job.seq_length)], model.heads),), layers=layers, ministages=sizes[rank])
        for rank, layers in enumerate(itertools.pairwise(ends))
    )
    plan = job_plan(job.workload(), [Replica(stages, batch, "interleaved")], 1)
    validate_plan(plan)
    gpus = {1: "PLAIN", 2: "DOUBLE"}
    return plan, job, [(f"n{number}", gpus[speed], 1) for number, speed in enumerate(speeds)]


def test_no_interleaved_pipeline_of_stages_that_differ_beats_it():
    nearest = 0.0
    for seed in range(20):
        random = Random(seed)
        plan, job, nodes = interleaved_stages(random)
        known = just_enough(plan, job, nodes, random.choice([50, FAST]))
        took = CostModel(job, known).estimate(plan).iteration_s
        depth = dataclasses.replace(job, pipeline_parallel=len(nodes))
        for request in (Request(job), Request(depth, frozenset(["pipeline_parallel", "data_parallel"]))):
            assert memory_fits(request, known)
            bound = joint_bound(request, known, LOOSER * took)
            assert bound.iteration_s <= took * (1 + 1e-9), (seed, request.fixed)
            nearest = max(nearest, bound.iteration_s / took)
    assert nearest > 0.85


def test_it_need_not_be_higher_than_what_was_found():
    job, known = tiny_job(global_batch_size=2), cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 1)])
    free = joint_bound(Request(job), known)
    for part in (0.5, 0.9, 1.1, 2):
        bound = joint_bound(Request(job), known, part * free.iteration_s)
        assert bound.iteration_s == pytest.approx(min(part, 1) * free.iteration_s, rel=3e-3)
    assert joint_bound(Request(job), known) == free
