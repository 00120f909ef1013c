"""Interleaved pipelines that the search estimates, against the cost model's passes."""

import numpy as np
import pytest

from megatron_hexi.cost.lanes import Lane
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.planner.joint.chunked_pipes import ChunkedPipe, chunked_part
from megatron_hexi.planner.joint.pipes import Pipe, PipeStage
from megatron_hexi.planner.joint.pools import StageShape

SHAPE = StageShape((1,), 1)


def pipe_of(layers, seconds, micro_batches, chunks):
    stages = tuple(
        PipeStage(SHAPE, count, "none", count * each) for count, each in zip(layers, seconds, strict=True)
    )
    return ChunkedPipe(stages, (0.0,) * (len(layers) - 1), micro_batches, True, chunks)


def timed(pipe):
    """Seconds of all passes in their order, without travel; a backward pass takes twice a forward pass."""
    lanes = tuple(
        (Lane(tuple(range(pipe.micro_batches)), Phases(token=stage.seconds), stage.seconds / 3),)
        for stage in pipe.stages
    )
    counts = np.array([stage.layers for stage in pipe.stages])[:, None]
    sizes = (counts + np.arange(pipe.chunks)[::-1]) // pipe.chunks
    nothing = np.zeros((len(lanes), pipe.micro_batches))
    return Pipeline(lanes, nothing, nothing, sizes / counts).seconds()


@pytest.mark.parametrize("chunks", [2, 3, 4, 6])
@pytest.mark.parametrize(
    ("layers", "seconds"),
    [
        ((12, 12), (1, 1)),
        ((12, 12, 12, 12), (1, 1, 1, 1)),
        ((12, 12, 24, 24), (2, 2, 1, 1)),
        ((7, 13, 15), (2, 1, 1)),
        ((8,) * 8, (1,) * 8),
    ],
)
def test_seconds_are_about_those_of_the_passes(layers, seconds, chunks):
    for micro_batches in (len(layers), 2 * len(layers), 4 * len(layers), 4 * len(layers) + 1):
        pipe = pipe_of(layers, seconds, micro_batches, chunks)
        assert pipe.seconds == pytest.approx(timed(pipe), rel=0.12)
        assert pipe.seconds == pipe.seconds_of(micro_batches)
        assert pipe.most_within(pipe.seconds) == micro_batches
        assert pipe.most_within(pipe.seconds * 0.999) < micro_batches


def test_chunks_make_a_pipeline_of_few_micro_batches_faster():
    cut = pipe_of((12,) * 4, (1,) * 4, 4, 4)
    whole = Pipe(cut.stages, cut.ways, 4, True)
    assert cut.seconds == pytest.approx(whole.seconds * chunked_part(4, 4))
    assert cut.seconds < 0.7 * whole.seconds
