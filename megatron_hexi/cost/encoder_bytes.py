"""Bytes that the images of a micro-batch keep on a unit of a first stage, by layers computed again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Counts, Floats
from megatron_hexi.cost.layer_bytes import attention_bytes, input_bytes, token_activation_bytes
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.models.job import Job


class EncoderBytes(NamedTuple):
    """Bytes that the images of a micro-batch keep on a unit until their backward pass.

    Args:
        layer: bytes of a layer.
        again: bytes of a layer that is computed again.
        outside: bytes outside layers.
    """

    layer: Floats
    again: Floats
    outside: Floats

    def kept(self, count: int, again: Counts) -> Floats:
        """Return the bytes of all layers, of which `again` are computed again; one of these is whole."""
        whole = np.where(np.greater(again, 0), self.layer, 0.0)
        return self.outside + (count - again) * self.layer + again * self.again + whole


def layers_again(job: Job, layers: Counts, again: Counts) -> Counts:
    """Return how many layers of the encoder are computed again: as many as of its stage's layers, or all.

    Megatron Bridge gives the encoder the decoder's --recompute-granularity, method and number of layers.

    Args:
        layers: number of the decoder's layers in the stage.
        again: number of these that are computed again.
    """
    vision = job.model.vision
    if vision is None or not job.again.is_whole:
        return 0 * again
    return np.where(np.greater_equal(again, layers), vision.layers, np.minimum(again, vision.layers))


def encoder_bytes(job: Job, images: Floats) -> EncoderBytes:
    """Return the bytes that images keep on a unit: inputs of layers and matrices, patches and features.

    Args:
        images: numbers of images of a micro-batch that a unit encodes.
    """
    own, vision = job.encoder, job.model.vision
    assert own is not None
    assert vision is not None
    rows, heads = images * own.seq_length, np.full(np.shape(images), float(own.model.heads))
    layer = rows * token_activation_bytes(own) + attention_bytes(own, rows, rows, heads, heads)
    # Of each projector the norm's input, two factors and the activation between them, and the features.
    columns = (1 + vision.deepstack) * (vision.merged_size * 4 + job.model.hidden_size)
    outside = rows * (vision.patch_values + columns / vision.merge**2) * own.element_bytes
    return EncoderBytes(layer, input_bytes(own, rows), outside)


def kept_bytes(job: Job, part: ModelPart, images: Floats | float) -> Floats:
    """Return the bytes that the images of a micro-batch keep on units with a part of the model, [U]."""
    vision = job.model.vision
    if job.images is None or vision is None:
        return np.zeros(())
    held = np.asarray(images, dtype=float) + np.zeros(np.shape(part.layers))
    found = encoder_bytes(job, held).kept(vision.layers, layers_again(job, part.layers, part.again))
    return part.is_first * found
