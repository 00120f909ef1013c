"""Passes of plain pipelines: their order is that of the mesh, and their times are those of the clocks."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hexi.cost.lanes import Lane
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.cost.plain_passes import pass_order
from megatron_hexi.mesh import pipeline_runs

SECONDS = st.floats(0, 2)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 13])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_passes_are_ordered_as_in_the_mesh(stages, micro_batches, chunks):
    if stages == 1 and chunks > 1:
        chunks = 1
    runs = pipeline_runs(stages, micro_batches, chunks, in_turn=False)
    order = pass_order(stages, micro_batches, chunks)
    assert order.passes() == [(run.stage, step) for run, _ in runs for step in run.steps]
    inputs = [-1 if one is None else one for _, sources in runs for one in sources]
    assert order.input.tolist() == inputs


@st.composite
def pipelines(draw):
    stages, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    borders = stages if chunks > 1 else stages - 1

    def numbers(*shape, values=SECONDS):
        count = int(np.prod(shape))
        return np.array(draw(st.lists(values, min_size=count, max_size=count))).reshape(shape)

    phases = [Phases(token=1 + more, logits=logits) for more, logits in numbers(stages, 2)]
    lanes = tuple((Lane(tuple(range(micro_batches)), one, 0.4),) for one in phases)
    parts = numbers(stages, chunks, values=st.floats(0.1, 1))
    weights = tuple(numbers(micro_batches, values=st.floats(0.1, 3)).tolist())
    return Pipeline(
        lanes,
        numbers(borders, micro_batches),
        numbers(borders, micro_batches),
        parts / parts.sum(axis=1, keepdims=True),
        posts_ahead=draw(st.booleans()),
        weights=weights if draw(st.booleans()) else None,
    )


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_times_of_plain_pipelines_are_those_of_the_clocks(pipeline):
    seconds, spans = pipeline.seconds(), pipeline.spans()
    with patch.object(Pipeline, "is_plain", False):
        assert seconds == pipeline.seconds()
        assert spans == pipeline.spans()
