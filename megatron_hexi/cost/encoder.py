"""The encoder of images of a replica's first stage: seconds of the images that each unit encodes.

Every rank of a unit has the whole encoder, and encodes its unit's images before the first layer of each
micro-batch. Its layers are timed by the rates of the decoder's products and of attention without a mask, of
each image by itself or in windows; their backward pass follows the decoder's. Where images are divided, their
features travel to the owners of their rows, which are taken to be spread evenly over the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_hexi.cluster import PassCurves
from megatron_hexi.cost.arrays import Counts, Floats, Ints
from megatron_hexi.cost.compute import Speeds, head_size_factor, rates, square_times, token_times
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.products import Elements, Products, Times, product_seconds
from megatron_hexi.models.job import Job
from megatron_hexi.models.vision import Vision

if TYPE_CHECKING:
    from megatron_hexi.cost.sections import Section


@dataclass(frozen=True, eq=False)
class Encoding:
    """Seconds of a micro-batch's images on the units of a section.

    Args:
        layers: passes of one layer of the encoder, [2][U].
        outside: passes of the patches' embedding and of the projectors, [2][U].
        sent: seconds in which features reach the rows' owners, and their gradients come back, [domains].
        count: number of the encoder's layers.
    """

    layers: Times
    outside: Times
    sent: Floats
    count: int

    def forward(self) -> Floats:
        """Return the seconds of each unit's forward pass, [U]."""
        return self.outside.forward + self.count * self.layers.forward

    def backward(self, again: Counts) -> Floats:
        """Return the seconds of each unit's backward pass, [U].

        Args:
            again: number of layers that it computes again (`layers_again`), or [U].
        """
        return self.outside.backward + self.count * self.layers.backward + again * self.layers.forward


def encoding(section: Section, links: LinkTable) -> Encoding | None:
    """Return the seconds of a section's images; ``None``: the section encodes none."""
    job, vision = section.job.encoder, section.job.model.vision
    if section.images is None or job is None or vision is None:
        return None
    stage, images = section.placement.stage, section.images
    layers, outside = (Times(np.zeros(len(images)), np.zeros(len(images))) for _ in range(2))
    for speeds, units in stage.by_kind:
        found = encoder_times(speeds, section.job, images[units])
        for seconds, own in zip((layers, outside), found, strict=True):
            for passes, of_kind in zip(seconds, own, strict=True):
                passes[units] = of_kind
    return Encoding(layers, outside, _sent(section, vision, links), vision.layers)


def encoder_times(speeds: Speeds, job: Job, images: Floats) -> tuple[Times, Times]:
    """Return the seconds of one layer of a GPU's encoder, and of what is outside its layers.

    Args:
        job: the job, with images.
        images: numbers of images that it encodes.
    """
    own, vision = job.encoder, job.model.vision
    assert own is not None
    assert vision is not None
    factor = head_size_factor(own.model.kernel_dim) / head_size_factor(job.model.kernel_dim)
    ways = (speeds.full.forward.scaled(factor), speeds.full.backward.scaled(factor))
    speeds = replace(speeds, full=PassCurves(*ways))
    patches = own.seq_length
    rows, near = images * patches, min(vision.window or patches, patches)
    token = token_times(speeds, own, rows)
    whole = vision.full_layers / vision.layers if vision.window else 1.0
    pairs = zip((whole, 1 - whole), (patches, near), strict=True)
    attention = [part * np.array(square_times(speeds, own, rows * side, side)) for part, side in pairs]
    layers = Times(*(np.array(token) + own.model.heads * sum(attention)))
    merged = rows / vision.merge**2
    projector = Products.of(vision.merged_size, vision.merged_size)
    projector += Products.of(vision.merged_size, job.model.hidden_size)
    outside = np.zeros((2, len(images)))
    for size, seen in (
        (Products.of(vision.patch_values, vision.hidden_size), rows),
        ((1 + vision.deepstack) * projector, merged),
    ):
        rate = rates(speeds.output, seen)
        outside += product_seconds(rate, speeds.memory, seen, size, Elements.of(own))
    return layers, Times(*outside)


def _sent(section: Section, vision: Vision, links: LinkTable) -> Floats:
    """Return the seconds of features to the owners of their rows and of gradients back, [domains]."""
    job, plan, images = section.job, section.arrays, section.images
    own = job.encoder
    assert images is not None
    assert own is not None
    found = np.zeros(len(section.replicas))
    columns = (1 + vision.deepstack) * job.model.hidden_size * job.element_bytes
    features = images * vision.tokens(own.seq_length) * columns
    for domain in np.flatnonzero(section.deals_images).tolist():
        units = np.flatnonzero(plan.unit_replica == domain)
        src, dst = _pairs(units)
        size = features[src] * plan.tokens[dst] / job.seq_length
        found[domain] = 2 * links.set_seconds(
            section.placement.stage.gpus[src], section.placement.stage.gpus[dst], size, job.tensor_parallel
        )
    return found


def _pairs(units: Ints) -> tuple[Ints, Ints]:
    """Return all pairs of different units: first and second, [pairs] each."""
    src, dst = (ends.ravel() for ends in np.meshgrid(units, units, indexing="ij"))
    return src[src != dst], dst[src != dst]
