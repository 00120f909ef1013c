"""Pipelines of stages that each process all micro-batches in one lane."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hexi.cost import Phases
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.lanes import Lane
from megatron_hexi.cost.pipeline import Pipeline


def pipeline_of(
    phases: Sequence[Phases],
    forward: Sequence[float],
    there: Sequence[float] | Floats,
    back: Sequence[float] | Floats,
    micro_batches: int,
    chunks: int = 1,
) -> Pipeline:
    """A pipeline in 1F1B, with chunks interleaved as by Megatron.

    Args:
        forward: seconds of a micro-batch's forward pass in each stage.
        there: seconds of activations over each border.
        back: seconds of gradients over each border.
    """
    takes = tuple(range(micro_batches))
    activations, gradients = (
        np.repeat(np.asarray(way, dtype=float)[:, None], micro_batches, axis=1) for way in (there, back)
    )
    return Pipeline(
        tuple((Lane(takes, one, ahead),) for one, ahead in zip(phases, forward, strict=True)),
        activations,
        gradients,
        np.full((len(phases), chunks), 1 / chunks),
        posts_ahead=chunks == 1,
    )
