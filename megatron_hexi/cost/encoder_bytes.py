"""Bytes that the images of a micro-batch keep on a unit of a first stage, by layers computed again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Counts, Floats
from megatron_hexi.cost.layer_bytes import attention_bytes, input_bytes, token_activation_bytes
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.models.job import Job


class EncoderBytes(NamedTuple):
    """Bytes that the images of a micro-batch take on a unit, most of them until their backward pass.

    Args:
        layer: bytes of a layer.
        again: bytes of a layer that is computed again.
        outside: bytes outside layers.
        once: bytes of a frozen encoder, which are free again before the next micro-batch.
    """

    layer: Floats
    again: Floats
    outside: Floats
    once: Floats

    def kept(self, count: int, again: Counts, in_flight: Counts) -> Floats:
        """Return the bytes of micro-batches in flight; of layers that are computed again, one is whole."""
        whole = np.where(np.greater(again, 0), self.layer, 0.0)
        kept = self.outside + (count - again) * self.layer + again * self.again + whole
        return self.once + in_flight * kept


def layers_again(job: Job, layers: Counts, again: Counts) -> Counts:
    """Return how many layers of the encoder are computed again: as many as of its stage's layers, or all.

    Megatron Bridge gives the encoder the decoder's --recompute-granularity, method and number of layers.
    Frozen layers have no backward pass that would compute them again.

    Args:
        layers: number of the decoder's layers in the stage.
        again: number of these that are computed again.
    """
    vision = job.model.vision
    if vision is None or not (job.again.is_whole and job.trained_vision[0]):
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
    rows, heads = images * own.seq_length, np.full(np.shape(images), float(own.workload().local_heads))
    layer = rows * token_activation_bytes(own) + attention_bytes(own, rows, rows, heads, heads)
    trains, projects = job.trained_vision
    # Of each projector the inputs of norm and activation, both factors if they are trained, and the features.
    wide = vision.merged_size * (1 + 1 / own.tensor_parallel) * (2 if projects else 1)
    columns = (1 + vision.deepstack) * (wide + job.model.hidden_size) / vision.merge**2
    merged, patches = (rows * each * own.element_bytes for each in (columns, vision.patch_values))
    if trains:  # beside adapters the patches' embedding is frozen
        kept = merged + patches * (not job.lora_rank)
        return EncoderBytes(layer, input_bytes(own, rows), kept, 0 * rows)
    kept = merged * projects
    return EncoderBytes(0 * rows, 0 * rows, kept, layer + patches + merged - kept)


def kept_bytes(job: Job, part: ModelPart, images: Floats | float, in_flight: Counts) -> Floats:
    """Return the bytes that images of micro-batches in flight keep on units with a part of the model, [U]."""
    vision = job.model.vision
    if job.images is None or vision is None:
        return np.zeros(())
    held = np.asarray(images, dtype=float) + np.zeros(np.shape(part.layers))
    again = layers_again(job, part.layers, part.again)
    return part.is_first * encoder_bytes(job, held).kept(vision.layers, again, in_flight)
