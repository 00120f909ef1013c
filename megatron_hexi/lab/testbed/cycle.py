"""The synthetic load that speeds are measured with, and the time of one cycle of it on a device."""

from __future__ import annotations

from megatron_hexi.cluster import Device
from megatron_hexi.cost.compute import ATTENTION_BACKWARD

#: The kernel whose curves a device must have: what ``--hexi-platform cpu`` computes attention with.
KERNEL = "aten-cpu"
#: A linear layer [width, width] and causal attention, forward and backward, on so many tokens. Heads are
#: those of the curves.
TOKENS, WIDTH, HEADS, HEAD_DIM = 256, 512, 2, 128


def cycle_seconds(device: Device) -> float:
    """Return the seconds of one cycle in fp32 by the device's curves."""
    product = 2 * TOKENS * WIDTH**2
    attention = 4 * HEADS * HEAD_DIM * TOKENS**2 / 2
    causal = device.attention(KERNEL).causal
    forward = device.layer_matmul.time(product, TOKENS) + causal.forward.time(attention, TOKENS)
    backward = 2 * device.layer_matmul.time(product, TOKENS) + causal.backward.time(
        ATTENTION_BACKWARD * attention, TOKENS
    )
    return (forward + backward) / fp32_factor(device)


def fp32_factor(device: Device) -> float:
    """Return the ratio of fp32 to 16-bit rates by datasheet; 1 where the device lacks either."""
    half, single = device.nominal.bf16 or device.nominal.fp16, device.nominal.fp32
    return single / half if half and single else 1.0
