"""The encoder of images where the ranks of a unit divide it: seconds, all-reduces and bytes by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_hexi.cost import CostModel
from megatron_hexi.cost.encoder import encoder_times
from megatron_hexi.cost.encoder_bytes import encoder_bytes
from megatron_hexi.errors import HexiError
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.plan.proportion import proportional_plan
from megatron_hexi.planner import Request
from tests.support.costs import cluster
from tests.unit.cost.test_encoder import (
    COUNTING,
    ENCODER,
    FROZEN,
    IMAGES,
    JOB,
    MODEL,
    RATE,
    seconds_of,
    with_patches,
)

JOINED = replace(JOB, model=replace(MODEL, vision=replace(ENCODER, in_megatron=True)))
HALVED = replace(JOINED, tensor_parallel=2)


def test_ranks_divide_layers_and_projectors():
    images = np.array([4.0])
    rows, wide = 4 * IMAGES.patches, 4 * ENCODER.hidden_size
    (whole, ends), (layer, halves) = (seconds_of(job, images) for job in (JOINED, HALVED))
    embedding = 2 * rows * ENCODER.patch_values * ENCODER.hidden_size
    projectors = 2 * (rows / 4) * 2 * wide * (wide + MODEL.hidden_size)
    assert layer.forward == pytest.approx(whole.forward / 2)
    assert layer.backward == pytest.approx(whole.backward / 2)
    assert ends.forward * RATE == pytest.approx(embedding + projectors)
    assert halves.forward * RATE == pytest.approx(embedding + projectors / 2)
    assert (ends.backward - halves.backward) * RATE == pytest.approx(projectors)
    of_transformers = seconds_of(replace(JOB, tensor_parallel=2), images)
    assert of_transformers[0].forward == pytest.approx(whole.forward)
    assert of_transformers[1].backward == pytest.approx(ends.backward)


@pytest.mark.parametrize(
    ("fields", "layers", "ends"), [((), 1, 1), (FROZEN[:1], 0, 1), (FROZEN[1:], 1, 1), (FROZEN, 0, 0)]
)
def test_ranks_add_up_what_each_computed(fields: tuple[str, ...], layers: int, ends: int):
    """A layer has two each way, of 256 patches; a projector one of 64 tokens, and back one of patches."""
    job: Any = replace(HALVED, images=replace(IMAGES, **dict.fromkeys(fields, True)))
    units = np.array([4.0, 0.0]), np.full(2, 1e9), np.full(2, 1e-6)
    patches, features = (size * 2 / 1e9 + 2e-6 for size in (256 * 256, 64 * MODEL.hidden_size))
    (forward, backward), (ahead, behind) = encoder_times(COUNTING, job, *units)[:, :, 1]
    assert forward == pytest.approx([2 * patches, 0])
    assert backward == pytest.approx([layers * 2 * patches, 0])
    assert ahead == pytest.approx([2 * features, 0])
    assert behind == pytest.approx([ends * 2 * patches, 0])
    assert not encoder_times(COUNTING, replace(JOB, tensor_parallel=2), *units)[:, :, 1].any()


def test_ranks_keep_their_part_of_heads_and_columns():
    """Rows have 256 columns; two ranks divide 2 heads of 128 and the 512 columns of the MLP."""
    own = encoder_bytes(HALVED, np.array([1.0]))
    norms, projection, mlp, attention = 4 * 256, 128, 2 * 256, 3 * 128
    assert float(own.layer[0]) == 64 * (2 * (norms + projection + mlp + attention) + 4)
    assert float(own.again[0]) == 64 * 2 * 256
    projector = 2 * 1024 + 2 * 512 + MODEL.hidden_size
    assert float(own.outside[0]) == 16 * 2 * 2 * projector + 64 * 2 * ENCODER.patch_values


def test_a_plan_counts_what_a_rank_of_a_unit_has():
    machines = cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 2)])
    plan = with_patches(proportional_plan(HALVED.workload(), [[[2, 1]]]), 2, 1)
    jobs = HALVED, replace(HALVED, images=None)
    images, text = (CostModel(job, machines).timing(plan) for job in jobs)
    weights = images.memory[0]["weights"] - text.memory[0]["weights"]
    assert weights.tolist() == [2 * sum(HALVED.model.encoder_params(2))] * 2
    (work,) = images.stages[0].first
    there, back = work.phases(np.arange(2))
    assert 0 < there.tensor_parallel < there.total
    added = images.replicas[0].total - text.replicas[0].total
    assert added == pytest.approx(4 * (there.total + back.total))
    found, plain = (simulate(plan, job, machines) for job in jobs)
    sums = found.phases.tensor_parallel - plain.phases.tensor_parallel
    assert sums == pytest.approx(4 * (there.tensor_parallel + back.tensor_parallel))
    drawn = sum(span.end_s - span.start_s for span in found.pipeline[0] if span.way == "encoder")
    assert drawn == pytest.approx(4 * sum(one.encoder + one.tensor_parallel for one in (there, back)))


def test_units_that_cannot_divide_it_are_refused():
    job, machines = replace(JOINED, tensor_parallel=4), cluster([("a", "PLAIN", 4)])
    plan = proportional_plan(job.workload(), [[[1]]])
    with pytest.raises(
        HexiError, match="size 4: give a number that divides the heads of the encoder of tiny, 2"
    ):
        CostModel(job, machines).timing(plan)
    CostModel(replace(job, model=MODEL), machines).timing(plan)
    assert Request(JOINED).widths(8) == [1, 2]
    assert Request(JOB).widths(8) == Request(replace(JOINED, images=None)).widths(8) == [1, 2, 4]
