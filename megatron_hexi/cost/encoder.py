"""The encoder of images of a replica's first stage: seconds of the images that each unit encodes.

Units encode before the first layer of each micro-batch. Each rank has the whole encoder, or its unit's ranks
divide its layers and projectors. They are timed by the rates of the decoder's products and of attention
without a mask, of each image by itself or in windows; backward passes follow the decoder's. Where images are
divided, features travel to the owners of their rows, which are taken to be spread evenly over the sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Counts, Floats
from megatron_hexi.cost.collectives import tensor_parallel_seconds
from megatron_hexi.cost.compute import Speeds, head_size_factor, rates, square_times, token_times
from megatron_hexi.cost.ends import EndWork
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.products import Elements, Products, Times, product_seconds
from megatron_hexi.models.job import Job
from megatron_hexi.models.vision import Vision
from megatron_hexi.plan.images import deal_images
from megatron_hexi.plan.units import DomainRow

if TYPE_CHECKING:
    from megatron_hexi.cost.sections import Section


class ImagesOfUnits(NamedTuple):
    """Images of a micro-batch that the units of a section encode.

    Args:
        of_units: number of each unit's, [U].
        dealt: whether each domain divides them among its units, [domains]; else every unit encodes all.
    """

    of_units: Floats
    dealt: tuple[bool, ...]


def images_of_units(rows: Sequence[DomainRow], job: Job, part: ModelPart | None) -> ImagesOfUnits | None:
    """Return the images of a section's units; ``None``: they encode none.

    Args:
        rows: the section's domains.
        job: the section's job.
        part: the part of the model in the plan's only stage; ``None``: the rows say which is first.
    """
    if job.images is None or not (rows[0].stage == 0 if part is None else np.any(part.is_first)):
        return None
    together, found = job.images.per_sequence * job.micro_batch_size, dict[tuple[int, ...], int]()
    dealt = list[bool]()
    for row in rows:
        members = row.domain.members
        weights = [member.patches for member in members if member.patches is not None]
        owners = Counter(deal_images([1] * together, weights)) if weights else None
        for unit, member in enumerate(members):
            found[member.ranks] = together if owners is None else owners[unit]
        dealt.append(owners is not None)
    return ImagesOfUnits(np.array([float(found[ranks]) for ranks in sorted(found)]), tuple(dealt))


@dataclass(frozen=True, eq=False)
class Encoding:
    """Seconds of a micro-batch's images on the units of a section, of work and of all-reduces inside units.

    Args:
        layers: passes of one layer of the encoder, [2][2, U].
        outside: passes of the patches' embedding and of the projectors, [2][2, U].
        sent: seconds in which features reach the rows' owners, and their gradients come back, [2][U].
        count: number of the encoder's layers.
    """

    layers: Times
    outside: Times
    sent: Times
    count: int

    def work(self, again: Counts, part: ModelPart | None = None) -> EndWork:
        """Return the seconds of both passes.

        Args:
            again: number of layers that are computed again (`layers_again`), or [U].
            part: the units' parts, whose ministages that run in turn encode again in the backward pass, all
                but the model's last; ``None``: they run whole.
        """
        twice = 0 if part is None else np.greater(part.ministages, part.is_last)
        forward = self.outside.forward + self.count * self.layers.forward
        backward = self.outside.backward + self.count * self.layers.backward + again * self.layers.forward
        sent = Times(self.sent.forward, self.sent.backward + twice * self.sent.forward)
        work, sums = zip(forward, backward + twice * forward, strict=True)
        return EndWork("encoder", *work, Times(*sums), sent)


def encoding(section: Section, links: LinkTable) -> Encoding | None:
    """Return the seconds of a section's images, 0 where it encodes none; ``None``: the job has no images."""
    vision, images = section.job.model.vision, section.images
    if section.job.images is None or vision is None:
        return None
    seconds, sent = np.zeros((2, 2, 2, len(section.units))), np.zeros((2, len(section.units)))
    if images is not None:
        stage = section.placement.stage
        for speeds, units in stage.by_kind:
            own = images.of_units[units], stage.bandwidth[units], stage.latency[units]
            seconds[..., units] = encoder_times(speeds, section.job, *own)
        sent = _sent(section, images, vision, links)
    return Encoding(Times(*seconds[0]), Times(*seconds[1]), Times(*sent), vision.layers)


def encoder_times(speeds: Speeds, job: Job, images: Floats, bandwidth: Floats, latency: Floats) -> Floats:
    """Return the seconds of one layer of units' encoders and of what is outside layers, [2, 2, 2, U].

    Each has both passes, and a pass its work and its all-reduces inside the unit. A layer has those of the
    decoder's, a projector one of features forward, and one of patches backward. Frozen layers, and the
    patches' embedding beside adapters, have no backward pass.

    Args:
        job: the job, with images.
        images: numbers of images that the units encode, [U].
        bandwidth: bandwidth of the links inside each unit's node, bytes/s, [U].
        latency: seconds of latency of a message inside the node, [U].
    """
    own, vision = job.encoder, job.model.vision
    assert own is not None
    assert vision is not None
    factor = head_size_factor(own.model.kernel_dim) / head_size_factor(job.model.kernel_dim)
    patches = own.seq_length
    rows, near = images * patches, min(vision.window or patches, patches)
    token = token_times(speeds, own, rows)
    whole = vision.full_layers / vision.layers if vision.window else 1.0
    pairs = zip((whole, 1 - whole), (patches, near), strict=True)
    attention = [part * np.array(square_times(speeds, own, rows * side, side)) for part, side in pairs]
    layers = np.array(token) + own.workload().local_heads / factor * sum(attention)
    trains, projects = job.trained_vision
    merged = rows / vision.merge**2
    embedding = Products.of(vision.patch_values, vision.hidden_size)
    inside, count = vision.merged_size / own.tensor_parallel, 1 + vision.deepstack
    projector = Products.of(vision.merged_size, inside) + Products.of(inside, job.model.hidden_size)
    of_layers = Elements.of(own, in_layer=True)
    (ahead, first), (projected, last) = (
        product_seconds(rates(speeds.output, seen), speeds.memory, seen, size, elements)
        for size, seen, elements in (
            (embedding, rows, Elements.of(own)),
            (count * projector, merged, of_layers if projects else replace(of_layers, adapters=0)),
        )
    )
    backward = (trains and not job.lora_rank) * first + (trains or projects) * last
    features = merged * job.model.hidden_size / vision.hidden_size  # as rows of the encoder's width
    back, there = (tensor_parallel_seconds(own, seen, bandwidth, latency) for seen in (rows, features))
    of_layer = [layers[0], 2 * back], [trains * layers[1], trains * 2 * back]
    outside = [ahead + projected, count * there], [backward, (trains or projects) * count * back]
    return np.array([of_layer, outside])


def _sent(section: Section, images: ImagesOfUnits, vision: Vision, links: LinkTable) -> Floats:
    """Return the seconds of features to the owners of their rows, and of gradients back, [2, U]."""
    job, plan = section.job, section.arrays
    assert job.images is not None
    found = np.zeros(len(section.units))
    columns = (1 + vision.deepstack) * job.model.hidden_size * job.element_bytes
    features = images.of_units * vision.tokens(job.images.patches) * columns
    for domain in np.flatnonzero(images.dealt).tolist():
        units = np.flatnonzero(plan.unit_replica == domain)
        src, dst = (ends.ravel() for ends in np.meshgrid(units, units, indexing="ij"))
        src, dst = src[src != dst], dst[src != dst]
        size = features[src] * plan.tokens[dst] / job.seq_length
        found[domain] = links.set_seconds(
            section.placement.stage.gpus[src], section.placement.stage.gpus[dst], size, job.tensor_parallel
        )
    return np.array([found, found * any(job.trained_vision)])
