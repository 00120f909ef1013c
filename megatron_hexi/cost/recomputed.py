"""Seconds of the modules of a layer that the backward pass computes again by themselves (`Again.modules`).

A module runs forward once more, just before its own backward pass: its matrices, what it moves, and the
collectives and all-to-alls inside it. Core attention is timed with the exchange (layer.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.calls import LAYER_CALLS
from megatron_hexi.cost.compute import Speeds, layer_factors, rates
from megatron_hexi.cost.layer_bytes import feed_forward_again, separate_norms
from megatron_hexi.cost.moved_bytes import forward_elements
from megatron_hexi.cost.products import Products, product_seconds
from megatron_hexi.kinds.part import Columns, WeightMatrix
from megatron_hexi.models.job import Job

if TYPE_CHECKING:
    from megatron_hexi.cost.layer import ExpertCycle, UnitGpus


class PassWork(NamedTuple):
    """Seconds of each unit's work in a layer outside core attention, [U], by the names of `layer.Pass`."""

    token: Floats
    tensor_parallel: Floats
    experts: Floats
    expert_exchange: Floats
    expert_wait: Floats


def work_again(job: Job, stage: UnitGpus, rows: Floats, sums: Floats, experts: ExpertCycle) -> PassWork:
    """Return the seconds that a layer's modules take to be computed again.

    Args:
        job: the job, with layers of one kind.
        rows: B x T of each unit, [U].
        sums: seconds of the collectives inside each unit around an MLP, [U].
        experts: seconds of the layer's routed experts.
    """
    token = np.zeros(len(rows))
    for speeds, units in stage.by_kind:
        token[units] = _token_seconds(speeds, job, rows[units])
    is_whole, inside = "moe" in job.again.modules, feed_forward_again(job)
    routed = [is_whole * seconds[0] for seconds in (experts.compute, experts.exchange, experts.wait)]
    if "moe_act" in job.again.modules and not is_whole:
        routed[0] = experts.activation
    return PassWork(token, inside * sums, *routed)


def _token_seconds(speeds: Speeds, job: Job, rows: Floats) -> Floats:
    speeds = speeds.of_layers(job)
    products, columns, normed = _recomputed(job)
    size = forward_elements(job, columns, normed, speeds.fp8_copies) * job.element_bytes
    found = product_seconds(
        rates(speeds.matmul, rows), speeds.memory, rows, products, layer_factors(speeds, job)
    )
    # An MLP is half of a layer's calls; other modules are a few.
    called = feed_forward_again(job) * speeds.call_s * LAYER_CALLS.forward / 2
    return np.maximum(found.forward + rows * size / speeds.memory, called * (rows > 0))


@lru_cache(maxsize=1024)
def _recomputed(job: Job) -> tuple[Products, Columns, float]:
    """Return the products of the modules, the columns of their rows, and columns whose norm is repeated."""
    model, width, hidden = job.model, job.tensor_parallel, job.model.hidden_size / job.row_parts
    how = width, job.row_parts, job.latent_exchange
    matrices, columns = list[WeightMatrix](), list[Columns]()
    of_mixer, of_feed_forward = separate_norms(job)
    normed = (of_mixer + of_feed_forward) * hidden * ("layernorm" in job.again.modules)
    if feed_forward_again(job):
        own = model.feed_forward.matrices(model, width)
        router = len(model.routed)  # behind the others; computed again with the whole layer only
        matrices += own if "moe" in job.again.modules else own[: len(own) - router]
        columns.append(model.feed_forward.row_columns(model, *how))
        normed += hidden * (not of_feed_forward)
    if "mla_up_proj" in job.again.modules and (up := model.mixer.matrices_up(model, width)):
        matrices += up
        made = model.mixer.row_columns(model, *how)
        columns.append(Columns(turned_apart=made.turned_apart, copied=made.copied))
    products = sum(
        (
            Products.of(one.inputs, one.outputs, 1 / job.row_parts if one.is_whole else 1.0)
            for one in matrices
        ),
        Products(),
    )
    return products, Columns.sum(columns), normed
