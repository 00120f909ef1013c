"""The division of images among the units of a first stage, by the speed at which each encodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from megatron_hexi.cluster import Device
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.encoder import encoder_times
from megatron_hexi.cost.encoder_bytes import layers_again
from megatron_hexi.models import Job
from megatron_hexi.plan import Domain
from megatron_hexi.planner.layouts.deal import assign_in_turn

#: Images in both ways, by which the seconds of one are taken: enough for the rates of many.
_SEVERAL = 8.0


def divided_images(domain: Domain, job: Job, device: Callable[[int], Device]) -> Domain:
    """Return the domain with its micro-batches' images divided so that the last unit ends early.

    Args:
        job: the job of the domain's units; where its images are not divided, the domain stays as it is.
        device: model of GPU of each rank.
    """
    if job.images is None or not job.images.divided:
        return domain
    members = domain.members
    seconds = tuple(max(image_seconds(device(rank), job) for rank in member.ranks) for member in members)
    counts = _dealt(job.images.per_sequence * job.micro_batch_size, seconds)
    patches = {
        member.ranks: count * job.images.patches for member, count in zip(members, counts, strict=True)
    }
    return domain.with_members(lambda member: replace(member, patches=patches[member.ranks]))


@lru_cache(maxsize=64)
def image_seconds(device: Device, job: Job) -> float:
    """Return the seconds of one image on a GPU, forward and backward."""
    vision = job.model.vision
    assert vision is not None
    layers, outside = encoder_times(device_speeds(device, job), job, np.array([_SEVERAL]))
    again = layers_again(job, 0, 0)
    whole = vision.layers * sum(layers) + again * layers.forward + sum(outside)
    return float(np.asarray(whole)[0]) / _SEVERAL


@lru_cache(maxsize=1024)
def _dealt(images: int, seconds: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of images of each unit."""
    return assign_in_turn(images, [partial(operator.mul, each) for each in seconds])
