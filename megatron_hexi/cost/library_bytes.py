"""Bytes that libraries take on a GPU beside torch's tensors: workspaces of attention kernels, NCCL's buffers.

Shape letters: B micro-batch, G tokens of the group, h query heads and k KV heads of the unit, D size of a
head as kernels see it, e bytes an element.
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cluster import Device
from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.models.job import Job

MIB = 2.0**20

#: Bytes that NCCL allocates for one channel to a peer that the GPU reaches directly, both directions: the
#: receiver's buffers of its three protocols, LL 0.5 + LL128 4.7 + Simple 4 MiB (computeBuffSizes in
#: src/init.cc), and the sender's, in pages of 2 MiB. Seen as 10 and 2 MiB:
#: https://github.com/NVIDIA/nccl/issues/1685
CHANNEL_BYTES = 12 * MIB
#: Channels to each peer for messages (ncclTopoGetNchannels and ncclTopoComputeP2pChannels in
#: src/graph/paths.cc): twice the links of NVLink, as a power of two, 32 on H100 (same issue); 2 over PCIe;
#: the least of all peers', and that is 2 where some are reached over a network.
NVLINK_CHANNELS, OTHER_CHANNELS = 32, 2


def workspace_bytes(job: Job, group_tokens: Floats, heads: Floats, kv: Floats) -> Floats:
    """Return the bytes of workspace of attention's backward pass, for the kernel that takes most.

    FlashAttention-2: gradient of queries in fp32, B G h D 4, and a sum of each row, B G h 4; where several
    queries share a KV head, gradients of keys and values by query head, 2 B G h D e (mha_varlen_bwd,
    https://github.com/Dao-AILab/flash-attention/blob/v2.8.3/csrc/flash_attn/flash_api.cpp). FlashAttention-3
    takes those in fp32 by KV head, which is less from four queries on. In fp32 neither of them runs.
    """
    if job.precision == "fp32":
        return np.zeros(np.shape(group_tokens))
    rows = job.micro_batch_size * group_tokens * heads
    if job.latent_exchange:  # each head has a key of its own by then
        kv = heads
    shared = np.where(heads > kv, 2.0 * job.element_bytes, 0.0)
    return rows * (job.model.kernel_dim * (4 + shared) + 4)


def message_channels(device: Device) -> int:
    """Return the number of NCCL's channels to each peer on the same node; 0 for a device without CUDA."""
    if device.capability == (0, 0):
        return 0
    return NVLINK_CHANNELS if device.link.kind.startswith("NVLink") else OTHER_CHANNELS


def message_buffer_bytes(arrays: PlanArrays, nodes: Ints, inside: Ints) -> Floats:
    """Return the bytes of NCCL's buffers for all-to-alls and for keys and values, for each unit, [U].

    Each communicator has its own buffers: that of the unit's group, and that of its domain, over which it
    exchanges keys with units of other groups. Peers on other nodes share one buffer a GPU, which is left out,
    as are collectives, whose channels have two peers each, whatever the number of ranks.

    Args:
        nodes: number of each unit's node, [U].
        inside: number of channels to a peer on the same node, [U] (`message_channels`).
    """
    count = int(nodes.max()) + 1
    in_group, group_spread = _beside(arrays.group, nodes, count)
    in_domain, domain_spread = _beside(arrays.unit_replica, nodes, count)
    channels = [
        np.where(spread, np.minimum(inside, OTHER_CHANNELS), inside)
        for spread in (group_spread, domain_spread)
    ]
    working = (arrays.heads > 0) & (arrays.group_tokens[arrays.group] > 0)
    peers = channels[0] * (in_group - 1) + channels[1] * (in_domain - in_group)
    buffers: Floats = CHANNEL_BYTES * np.where(working, peers, 0)
    return buffers


def _beside(owner: Ints, nodes: Ints, count: int) -> tuple[Ints, Bools]:
    """Return, for each unit, how many units of its owner are on its node, and whether others are elsewhere.

    Both are [U]; a unit's owner is its group or its domain.
    """
    together = np.bincount(owner * count + nodes, minlength=(int(owner.max()) + 1) * count)
    here = together[owner * count + nodes]
    return here, here < np.bincount(owner)[owner]
