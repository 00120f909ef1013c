"""The attention kernels of the time when a row was published, in place of the catalogue's.

- ``triton``: FlashAttention's first Triton kernel. FlashAttention-2 is 1.3 to 2.5 times as fast (arXiv
  2307.08691, section 4.1); the geometric mean is 1.8.
- ``scores``: Megatron-LM before FlashAttention. Its products compute all pairs, masked ones too, and keep the
  scores in 16 bits for a fused softmax (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h) and for
  dropout, by default 0.1 (megatron/arguments.py), whose mask is a byte. Bytes a score, forward: written 2,
  read and written by the softmax 4 and by dropout 4, its mask 1, read 2; backward: gradients of
  probabilities written 2, dropout 4, its mask 1, softmax 6, read by two products 4, and probabilities read
  by one 2.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published.tables import Row, model
from megatron_hexi.cluster import Curve, Device
from megatron_hexi.cluster.device import Attention, PassCurves
from megatron_hexi.cost.compute import ATTENTION_BACKWARD, head_size_factor
from megatron_hexi.cost.moved_bytes import HBM_SHARE

#: Of FlashAttention-2's rate.
_TRITON = 1 / 1.8
#: Bytes of a score that kernels read and write, forward and backward.
_SCORE_BYTES = (13, 19)


def of_its_day(device: Device, row: Row) -> Device:
    """The device with the row's attention.

    Args:
        device: of the catalogue.
        row: what it trains.
    """
    if row.attention == "triton":
        known = device.attention("flash-attn-2")
        return replace(device, attentions=(known.map(lambda curve: curve.scaled(_TRITON)),))
    if row.attention == "scores":
        return replace(device, attentions=(_scores(device, row),))
    return device


def _scores(device: Device, row: Row) -> Attention:
    """Rates of products and a softmax between, by causal FLOPs of heads of the curves' size."""
    dim = model(row.model).head_dim
    flops = 4 * dim  # of a pair, forward
    rate, memory = device.layer_matmul.rates[-1] * 1e12, device.memory_gb_s * 1e9 * HBM_SHARE
    seconds = (
        flops * passes / rate + size / memory for passes, size in zip((1, 2), _SCORE_BYTES, strict=True)
    )
    counted = flops / head_size_factor(dim)
    rates = [
        counted * times / 2 / one / 1e12 for times, one in zip((1, ATTENTION_BACKWARD), seconds, strict=True)
    ]
    causal = PassCurves(*(Curve((1.0,), (rate,), "counted") for rate in rates))
    full = PassCurves(*(Curve((1.0,), (2 * rate,), "counted") for rate in rates))
    return Attention(row.kernel or device.attentions[0].kernel, causal, full)
