"""A GPU from what somebody measured of a model's parts on it, as `hexi probe` would have measured it.

matrix products   the head's backward pass but for what is bound by memory: 4 rows x hidden x vocabulary FLOPs
attention         what a layer takes beside its matrices and its norms, residuals and activation; plain
                  attention is bound by its scores, so a head takes as long whatever its size
links             the look-up in a unit of t is one all-reduce longer: 2 (t - 1) / t x rows x hidden x 4 bytes
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.published.tables import Profile
from megatron_hexi.cluster import Curve, Device, device
from megatron_hexi.cluster.device import Attention, Link, PassCurves
from megatron_hexi.cost.compute import (
    ATTENTION_BACKWARD,
    device_speeds,
    head_size_factor,
    logits_times,
    token_times,
)
from megatron_hexi.cost.moved_bytes import HBM_SHARE
from megatron_hexi.cost.products import written
from megatron_hexi.models import Job, Model

CONTEXT = 2048
#: Not a kernel of flash attention: its times are those of plain products and a softmax between.
KERNEL = "profiled"
#: TFLOP/s that leave only what is bound by memory.
_FREE = 1e12


def profiled_device(name: str, profile: Profile, model: Model, unit: int, head_dim: int) -> Device:
    """The catalogue's GPU with measured curves.

    Args:
        name: what the profile calls it.
        profile: seconds of the model's parts, in fp32.
        model: the one that was profiled.
        unit: tensor-parallel size, for the links.
        head_dim: of the model that will run.
    """
    job = Job(model, CONTEXT, profile.samples, profile.samples, precision="fp32")
    rows = np.array([float(profile.samples * CONTEXT)])
    slow = device_speeds(_device(name, profile, 1.0, (_FREE, _FREE), 1.0), job)
    head = float(
        logits_times(slow, job, rows).backward[0]
    )  # bound by the products, as it is when they are fast
    flops = 4 * rows[0] * model.vocab_params() / 1e12
    products = flops / (profile.head - (head - flops))
    working = device_speeds(_device(name, profile, products, (_FREE, _FREE), 1.0), job)
    token = token_times(working, job, rows)
    flops = profile.samples * model.heads * 4 * head_dim * CONTEXT**2 / 2 / 1e12
    left = [seconds - float(one[0]) for seconds, one in zip(profile.layer, token, strict=True)]
    heads = flops / head_size_factor(head_dim)
    sent = 2 * (unit - 1) / unit * rows[0] * model.hidden_size * 4
    return _device(
        name,
        profile,
        products,
        (heads / left[0], ATTENTION_BACKWARD * heads / left[1]),
        sent / (profile.units[unit] - profile.embedding) / 1e9,
    )


def _device(
    name: str, profile: Profile, products: float, attention: tuple[float, float], link_gb_s: float
) -> Device:
    passes = PassCurves(*(_curve(rate) for rate in attention))
    known = device(profile.device)
    return replace(
        known,
        name=name,
        nominal=replace(known.nominal, bf16=None, fp16=None, fp32=products),
        matmul=written(products, known.memory_gb_s * 1e9 * HBM_SHARE, element=4),
        attentions=(Attention(KERNEL, passes, passes),),
        link=Link("profiled", link_gb_s, known.link.latency_us, source="Sailor's profiles"),
        layer_share=1.0,
        of_single_cards=False,
    )


def _curve(rate: float) -> Curve:
    return Curve((1.0,), (rate,), "Sailor's profiles")
