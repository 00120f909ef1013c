"""Tables of stages and the pipelines that are made of them, against one stage and one pipeline at a time."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hexi.cost.memory import GIB, RESERVE_BYTES, owned_params, part_params, weight_bytes
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.planner.expert_placement import IN_WHOLE_STAGES
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.pipeline_search import PipelineSearch
from megatron_hexi.planner.joint.pools import StageShape
from megatron_hexi.planner.joint.stage_tables import UNDER_WAY, StageTables
from megatron_hexi.planner.request import Request
from tests.support.costs import TINY, cluster, tiny_job

LAYERS, MOST_STRETCH, LEAST_ROOM = 8, 20.0, 0.02
MODEL = dataclasses.replace(TINY, layers=LAYERS, hidden_size=2048, ffn_hidden_size=8192)
JOB = tiny_job(model=MODEL, seq_length=2**15, recompute="selective")
TIMER = LayerTimer(
    JOB,
    cluster([("a", "DOUBLE", 4), ("b", "PLAIN", 4), ("c", "PLAIN", 4)]),
    [1, 2],
    IN_WHOLE_STAGES,
    ("none", "selective", ("mlp",), "full"),
)
SHAPES = [
    StageShape(counts, width)
    for counts in ((4, 0), (1, 0), (2, 0), (0, 8), (0, 4), (0, 2), (4, 4), (2, 2), (4, 8))
    for width in (1, 2)
    if all(count % width == 0 for count in counts)
]


def stretch(caps, weights):
    """The least x such that units with x times their share, or what memory holds, take all tokens."""
    if len(caps) == 1:
        return 1.0 if caps[0] >= 1 else np.inf
    if weights @ caps < 1 or min(caps) < LEAST_ROOM:
        return np.inf
    low, high = 1.0, MOST_STRETCH
    if weights @ np.minimum(caps, high) < 1:
        return np.inf
    if weights @ np.minimum(caps, low) >= 1 - 1e-12:
        return low
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if weights @ np.minimum(caps, middle) >= 1 else (middle, high)
    return high


def seconds_of(tables, shape, count, under_way, is_first, is_last, shards):
    """The least seconds of a stage with a number of layers, over what it recomputes."""
    layer, job = tables.timer.layer(shape, False), tables.timer.job(shape.width)
    params = int(part_params(job, ModelPart(count, count, is_first, is_last, 1)))
    each, owned = weight_bytes(job), owned_params(job, params, shape.units * shards)
    held = params * (each.weight + each.gradient) + owned * each.state + RESERVE_BYTES
    held = held + is_last * layer.logits_bytes + (2 - is_first - is_last) * layer.border_bytes
    room = np.array([tables.pools.usable_gib[kind] for kind in shape.kinds]) * GIB - held
    weights = layer.units * layer.tokens / (layer.units @ layer.tokens)
    missing = count * under_way * layer.kept[0] + layer.working[-1] - room
    some = np.ceil(np.maximum(missing, 0) / (under_way * (layer.kept[0] - layer.kept[-1]))).max()
    best = np.inf
    whole = [(mode, count) for mode in range(1, len(tables.timer.offered))]
    for mode, again in ((0, 0), *whole, (-1, int(np.clip(some, 1, count)))):
        kept = again * layer.kept[mode] + (count - again) * layer.kept[0]
        caps = np.maximum(room, 0) / (under_way * kept + layer.working[mode])
        took = count * layer.seconds + again * layer.added[mode] + is_last * layer.logits
        best = min(best, took * stretch(caps, weights))
    return best


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_tables_of_many_stages_are_those_of_each(data):
    memory = data.draw(st.floats(0.02, 0.4))
    shards, is_last = data.draw(st.sampled_from([1, 2, 8])), data.draw(st.booleans())
    tables = StageTables(Request(JOB), TIMER, TIMER.pools.with_memory(memory))
    tables.prepare(SHAPES, is_last, shards, False, deep=True)
    shape, is_first = data.draw(st.sampled_from(SHAPES)), data.draw(st.booleans())
    under_way = data.draw(st.sampled_from(UNDER_WAY))
    found = tables.table(shape, under_way, is_first, is_last, shards, False)
    wanted = [
        seconds_of(tables, shape, count, under_way, is_first, is_last, shards)
        for count in range(1, LAYERS + 1)
    ]
    assert found is not None
    assert found.seconds == pytest.approx(np.maximum.accumulate(wanted), rel=1e-9)


def most_layers(search, tables, shape, depth, places, micro_batches, limit):
    """The most layers of `depth` equal stages at these places, from the last one, within seconds each."""
    behind, is_first, is_last = places
    crossings = search._pools.crossings(shape, depth) or [True]
    way = search._pools.seconds_between(shape, shape, search._bytes, sum(crossings) / len(crossings))
    total = 0
    for place in range(depth):
        last = is_last and place == 0
        under_way = min(micro_batches, behind + place + 1)
        table = tables.table(shape, under_way, is_first and place == depth - 1, last, 1, False)
        fits = int((table.seconds + (0 if last else 2 * way) <= limit).sum())
        if not fits:
            return None
        total += fits
    return total


def fastest(search, tables, blocks, micro_batches):
    """The first time of the grid within which the blocks run all layers, by the number of stages."""
    found: dict[int, int] = {}
    options = [search._runs.options(block, None) for block in blocks]
    for chosen in itertools.product(*options):
        depth = sum(stages for _, stages in chosen)
        if depth > LAYERS:
            continue
        for time, limit in enumerate(search._grid):
            total, behind = 0, depth
            for number, (shape, stages) in enumerate(chosen):
                behind -= stages
                places = behind, number == 0, number == len(chosen) - 1
                layers = most_layers(search, tables, shape, stages, places, micro_batches, limit)
                if layers is None:
                    break
                total += layers
            else:
                if total >= LAYERS:
                    found[depth] = min(time, found.get(depth, time))
                    break
    return found


@pytest.mark.parametrize("memory", [0.08, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 6])
def test_all_depths_at_once_find_the_fastest_pipeline_of_each(memory, micro_batches):
    request = Request(dataclasses.replace(JOB, global_batch_size=micro_batches))
    tables = StageTables(request, TIMER, TIMER.pools.with_memory(memory))
    search = PipelineSearch(request, tables)
    for blocks in search._runs.partitions((4, 4)):
        candidates = list(search._candidates(blocks, micro_batches, 1, None))
        wanted = fastest(search, tables, blocks, micro_batches)
        assert {one.depth: one.time for one in candidates} == wanted
        for one in candidates:  # and it is that pipeline
            shapes = search._walk(one, None)
            assert len(shapes) == one.depth
            pipe = search.layered(shapes, micro_batches, 1)
            assert pipe is not None
            ways = max([0.0, *pipe.ways])
            assert max(stage.seconds for stage in pipe.stages) <= search._grid[one.time] + 4 * ways
