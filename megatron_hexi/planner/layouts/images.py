"""The division of images among the units of a first stage, by the speed at which each encodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from megatron_hexi.cluster import Cluster, Device, Node, Rank
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.encoder import encoder_times
from megatron_hexi.cost.encoder_bytes import layers_again
from megatron_hexi.models import Job
from megatron_hexi.plan import Domain
from megatron_hexi.planner.layouts.deal import assign_in_turn

#: Images in both ways, by which the seconds of one are taken: enough for the rates of many.
_SEVERAL = 8.0


def divided_images(domain: Domain, job: Job, cluster: Cluster, gpu: Callable[[int], Rank]) -> Domain:
    """Return the domain with its micro-batches' images divided so that the last unit ends early.

    Args:
        job: the job of the domain's units; where its images are not divided, the domain stays as it is.
        gpu: the cluster's GPU of each rank.
    """
    if job.images is None or not job.images.divided:
        return domain
    members = domain.members
    seconds = tuple(
        max(image_seconds(one.device, cluster.nodes[one.node], job) for one in map(gpu, member.ranks))
        for member in members
    )
    counts = _dealt(job.images.per_sequence * job.micro_batch_size, seconds)
    patches = {
        member.ranks: count * job.images.patches for member, count in zip(members, counts, strict=True)
    }
    return domain.with_members(lambda member: replace(member, patches=patches[member.ranks]))


@lru_cache(maxsize=1024)
def image_seconds(device: Device, node: Node, job: Job) -> float:
    """Return the seconds of one image on a GPU in a unit on a node, forward and backward."""
    vision = job.model.vision
    assert vision is not None
    own = (np.array([one]) for one in (_SEVERAL, node.unit_bandwidth(job.tensor_parallel), node.latency_s))
    layers, outside = encoder_times(device_speeds(device, job), job, *own).sum(axis=(2, 3))
    again = layers_again(job, 0, 0)
    return float(vision.layers * layers.sum() + again * layers[0] + outside.sum()) / _SEVERAL


@lru_cache(maxsize=1024)
def _dealt(images: int, seconds: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of images of each unit."""
    return assign_in_turn(images, [partial(operator.mul, each) for each in seconds])
