"""Parts of the joint search: layers, packing, what links and sums take, and GPUs for stages."""

import dataclasses
import itertools
import math
from random import Random

import numpy as np
import pytest

from megatron_hexi.cost import CostModel
from megatron_hexi.plan import (
    Domain,
    Group,
    Member,
    Plan,
    Replica,
    Stage,
    proportional_plan,
)
from megatron_hexi.planner import find_plan
from megatron_hexi.planner.expert_placement import IN_WHOLE_STAGES
from megatron_hexi.planner.joint.assembly import Assembly
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.packing import pack
from megatron_hexi.planner.joint.pipes import Pipe, PipeStage, least_longest
from megatron_hexi.planner.joint.placing import StagePlace, find_gpus, number_ranks
from megatron_hexi.planner.joint.pools import Pools, StageShape
from megatron_hexi.planner.joint.replica_columns import Column
from megatron_hexi.planner.joint.synchronisation import Synchronisation
from megatron_hexi.planner.request import Request
from tests.support.costs import TINY, cluster, tiny_job

DEEP = dataclasses.replace(TINY, layers=4)


# Layers to stages


@pytest.mark.parametrize("seed", range(60))
def test_layers_are_dealt_as_well_as_can_be(seed):
    random = np.random.default_rng(seed)
    stages, layers = int(random.integers(1, 5)), int(random.integers(1, 9))
    seconds = np.cumsum(random.integers(0, 5, (stages, layers)), axis=1).astype(float)
    for times in seconds:  # from some number on they do not fit
        times[int(random.integers(0, layers + 1)) :] = np.inf
    every = [deal for deal in itertools.product(range(1, layers + 1), repeat=stages) if sum(deal) == layers]
    longest = [max(times[count - 1] for times, count in zip(seconds, deal, strict=True)) for deal in every]
    found = least_longest(seconds, layers)
    if min(longest, default=np.inf) == np.inf:
        assert found is None
        return
    assert found is not None
    assert sum(found) == layers
    assert min(found) >= 1
    assert max(times[count - 1] for times, count in zip(seconds, found, strict=True)) == min(longest)


# Replicas that share the fleet


def random_column(random, totals, sync_s):
    counts = tuple(random.randint(0, total) for total in totals)
    if not any(counts):
        counts = totals
    stages = tuple(
        PipeStage(StageShape(counts, 1), 1, "none", random.uniform(0.5, 2) / sum(counts))
        for _ in range(random.randint(1, 3))
    )
    ways = tuple(random.uniform(0, 0.3) for _ in stages[1:])
    return Column(counts, Pipe(stages, ways, 1, True), 1, sync_s)


def best_packing(columns, micro_batches, totals, replicas):
    """Seconds of the best of all multisets of columns, and all ways to deal micro-batches to them."""
    best = math.inf
    for count in replicas:
        for some in itertools.combinations_with_replacement(columns, count):
            used = map(sum, zip(*(column.counts for column in some), strict=True))
            if any(count > total for count, total in zip(used, totals, strict=True)):
                continue
            for ends in itertools.combinations(range(1, micro_batches), count - 1):
                deal = [stop - start for start, stop in itertools.pairwise((0, *ends, micro_batches))]
                best = min(best, max(one.seconds(share) for one, share in zip(some, deal, strict=True)))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_replicas_are_packed_as_well_as_can_be(seed):
    random = Random(seed)
    totals = random.choice([(4,), (3, 4), (2, 2, 2)])
    sync_s = random.choice([0.0, 0.3])
    columns = [random_column(random, totals, sync_s) for _ in range(random.randint(1, 6))]
    first = random.choice([1, 1, 2])
    micro_batches = random.randint(first, 6)
    replicas = range(first, min(first + random.randint(0, 2), micro_batches) + 1)
    best = best_packing(columns, micro_batches, totals, replicas)
    packed = pack(columns, micro_batches, totals, replicas)
    if packed is None:
        assert best == math.inf
        return
    assert len(packed.columns) in replicas
    assert sum(packed.micro_batches) == micro_batches
    assert min(packed.micro_batches) >= 1
    used = [sum(counts) for counts in zip(*(column.counts for column in packed.columns), strict=True)]
    assert all(count <= total for count, total in zip(used, totals, strict=True))
    assert best * (1 - 1e-9) <= packed.seconds <= 1.003 * best
    assert packed.least_s <= best * (1 + 1e-9)


def test_replicas_as_many_as_micro_batches_are_packed():
    """OR-Tools 9.15's search for symmetries ends the process at this model, with its two equal sums."""
    counts = [(3, 0, 0), (1, 2, 0), (0, 4, 0), (0, 0, 4)]
    columns = [
        Column(count, Pipe((PipeStage(StageShape(count, 1), 1, "none", 1.0),), (), 1, True), 1, 0.0)
        for count in counts
    ]
    packed = pack(columns, 4, (3, 4, 8), range(4, 5), most_s=1.0)
    assert packed is not None
    used = [sum(taken) for taken in zip(*(column.counts for column in packed.columns), strict=True)]
    assert len(packed.columns) == 4
    assert all(map(int.__le__, used, (3, 4, 8)))


# Thin links


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "stages", [2, 4, *(pytest.param(count, marks=pytest.mark.slow) for count in (8, 16))]
)
def test_pipelines_over_thin_links_take_what_was_expected(monkeypatch, stages, tied):
    # Stages of one GPU and of two on nodes of four: some borders lie between nodes.
    found, run = [], Assembly.run

    def told(self, packed, **how):
        candidate = run(self, packed, **how)
        assert candidate is not None
        found.append((packed.seconds, candidate.iteration_s))
        return candidate

    monkeypatch.setattr(Assembly, "run", told)
    known = cluster([(name, "PLAIN", 4) for name in "abcd"], 0.2)
    # Tied embeddings are summed between both ends of a pipeline, over the thinnest link.
    vocabulary = 2**15 if tied else TINY.vocab_size
    model = dataclasses.replace(TINY, layers=16, tied_embeddings=tied, vocab_size=vocabulary)
    job = tiny_job(model=model, seq_length=2**14, global_batch_size=32, pipeline_parallel=stages)
    find_plan(Request(job, frozenset({"data_parallel", "pipeline_parallel"})), known)
    assert found
    for expected, seconds in found:
        assert 0.8 < seconds / expected < 1.15


def test_stages_that_fill_nodes_have_borders_between_nodes_where_a_node_ends():
    known = cluster([("a", "PLAIN", 4), ("b", "PLAIN", 4)], 1)
    pools = Pools.of(known, [1.0, 1.0])
    single, pair, node = StageShape((1,), 1), StageShape((2,), 1), StageShape((4,), 1)
    assert pools.crossings(single, 8) == [False, False, False, True, False, False, False]
    assert pools.crossings(pair, 4) == [False, True, False]
    assert pools.crossings(node, 2) == [True]
    inside = pools.seconds_between(pair, pair, 1e9, 0)
    outside = pools.seconds_between(node, node, 1e9, 1)
    assert inside < outside / 4
    maybe = pools.seconds_between(pair, pair, 1e9, 0.25)
    assert maybe == pytest.approx(
        0.75 * inside + 0.25 * 2 * outside, rel=1e-3
    )  # two GPUs send what four would


def test_gradients_of_replicas_in_stages_take_as_long_as_in_the_cost_model():
    known = cluster([(name, "PLAIN", 1) for name in "abcd"], 0.1)
    model = dataclasses.replace(DEEP, vocab_size=128, tied_embeddings=False)
    job = tiny_job(model=model, global_batch_size=4)
    one = dataclasses.replace(job, global_batch_size=1, recompute="selective")
    sync, shape = (
        Synchronisation(LayerTimer(one, known, [1], IN_WHOLE_STAGES, ("none", "full"))),
        StageShape((1,), 1),
    )
    stages = [
        Stage((one_unit(job, rank),), layers=(rank % 2 * 2, rank % 2 * 2 + 2), recompute="none")
        for rank in range(4)
    ]
    plan = Plan(job.workload(), (Replica(tuple(stages[:2]), 2), Replica(tuple(stages[2:]), 2)))
    phases = CostModel(dataclasses.replace(job, data_parallel=2), known).timing(plan).phases
    expected = sync.seconds([PipeStage(shape, 2, "none", 1.0)] * 2, 2)
    assert phases.gradients + phases.optimizer == pytest.approx(expected, rel=0.05)


def test_gradients_hide_where_messages_leave_the_network_free_as_in_the_cost_model():
    model = dataclasses.replace(DEEP, vocab_size=128, tied_embeddings=False)
    job = tiny_job(model=model, overlap_gradients=True)
    known = cluster([(name, "PLAIN", 1) for name in "ab"], 0.1)
    one = dataclasses.replace(job, global_batch_size=1, recompute="selective")
    timer, shape = LayerTimer(one, known, [1], IN_WHOLE_STAGES, ("none", "full")), StageShape((2,), 1)
    plans = [proportional_plan(job.workload(), [groups]) for groups in ([[1, 1]], [[1], [1]])]
    timings = [CostModel(job, known).timing(plan) for plan in plans]
    phases = min(timings, key=lambda timing: timing.stages[0].layer.backward.finish.max()).phases
    sync = Synchronisation(timer).seconds([PipeStage(shape, model.layers, "none", 1.0)], 1)
    assert sync == pytest.approx(phases.gradients + phases.optimizer, rel=1e-6)


def one_unit(job, rank):
    """A GPU with all tokens and heads."""
    members = (Member((rank,), job.seq_length, (0, job.model.heads)),)
    return Domain((Group(((0, job.seq_length),), members),))


# GPUs for stages


def random_shapes(random, pools):
    """Shapes of replicas' stages that a packing may have: no more GPUs than there are."""
    left = list(pools.totals)
    replicas = []
    for _ in range(random.randint(1, 4)):
        stages = []
        for _ in range(random.randint(1, 3)):
            pool = random.randrange(len(left))
            width = random.choice((1, 2, 4))
            size = pools.node_gpus(pool, width)
            if not size:
                continue
            count = random.choice([width, 2 * width, size, 2 * size])
            taken = count if count <= size else count // size * pools.pools[pool].size
            if taken <= left[pool] and pools.tiles(pool, count, width):
                left[pool] -= taken
                stages.append(StageShape(tuple(count * (pool == own) for own in range(len(left))), width))
        if stages:
            replicas.append(stages)
    return replicas


@pytest.mark.parametrize("seed", range(60))
def test_no_gpu_is_given_twice_and_ranks_keep_the_runtime_s_rules(seed):
    random = Random(seed)
    names = [("a", "DOUBLE", 4), ("b", "PLAIN", 4), ("c", "DOUBLE", 4), ("d", "PLAIN", 8), ("e", "PLAIN", 4)]
    names += random.choice([[], [("f", "PLAIN", 7), ("g", "PLAIN", 7), ("h", "DOUBLE", 5)]])
    random.shuffle(names)
    known = cluster(names)
    pools = Pools.of(known, [known.nodes[number].device.memory_gb_s for number in range(len(known.nodes))])
    replicas = random_shapes(random, pools)
    if not replicas:
        return
    placed = find_gpus(pools, replicas, beside_alike=bool(seed % 2))
    if placed is None:  # parts of nodes that do not add up, or all ends on one node
        return
    given = [gpu for gpus in placed.values() for gpu in gpus]
    assert len(given) == len(set(given))
    for place, gpus in placed.items():
        shape = replicas[place.replica][place.stage]
        in_pools = [sum(known.ranks[gpu].node in pool.nodes for gpu in gpus) for pool in pools.pools]
        assert tuple(in_pools) == shape.counts
        assert place.stages == len(replicas[place.replica])
        for first in range(0, len(gpus), shape.width):
            unit = gpus[first : first + shape.width]
            assert {known.ranks[gpu].node for gpu in unit} == {known.ranks[unit[0]].node}
            assert unit == list(range(unit[0], unit[0] + shape.width))
            assert known.ranks[unit[0]].local % shape.width == 0
    order = number_ranks(known, placed)
    assert sorted(order) == sorted(given)
    place_of = {gpu: place for place, gpus in placed.items() for gpu in gpus}
    # The job's first rank reads data, its last one has the loss: megatron/stages/stage_arguments.py.
    assert place_of[order[0]].is_first or place_of[order[0]].is_last
    assert place_of[order[-1]].is_last
    # GPUs of a node follow each other.
    nodes = [node for node, _ in itertools.groupby(known.ranks[gpu].node for gpu in order)]
    assert len(nodes) == len(set(nodes))


def test_parts_of_nodes_stand_beside_neighbours_or_beside_the_same_stage_of_other_replicas():
    known = cluster([("a", "PLAIN", 4), ("b", "PLAIN", 4)])
    pools, replica = Pools.of(known, [1.0] * 2), [StageShape((2,), 1)] * 2
    for beside_alike, same in ((False, "replica"), (True, "stage")):
        placed = find_gpus(pools, [replica, replica], beside_alike=beside_alike)
        assert placed is not None
        node_of = {place: {known.ranks[gpu].node for gpu in gpus} for place, gpus in placed.items()}
        for one, other in itertools.combinations(node_of, 2):
            assert (node_of[one] == node_of[other]) == (getattr(one, same) == getattr(other, same))


def test_ends_of_pipelines_stand_at_the_ends():
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2), ("c", "PLAIN", 2)])
    middle, first, last = (StagePlace(0, stage, 3) for stage in (1, 0, 2))
    order = number_ranks(known, {middle: [0, 1], last: [2, 3], first: [4, 5]})
    assert order == [4, 5, 0, 1, 2, 3]
    # One node has everything.
    assert number_ranks(known, {StagePlace(0, 0, 2): [0], StagePlace(0, 1, 2): [1]}) == [0, 1]
    assert number_ranks(known, {StagePlace(0, 1, 2): [0], StagePlace(0, 0, 2): [1]}) == [1, 0]
    # Both ends are on one node, and it cannot be first and last.
    assert number_ranks(known, {first: [0], last: [1], middle: [2, 3]}) == []
    pools = Pools.of(known, [1.0] * 3)
    assert find_gpus(pools, [[StageShape((1,), 1), StageShape((4,), 1), StageShape((1,), 1)]]) is None
