"""An upper bound of tokens/s: every GPU at its best rates, without communication or waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hexi.cluster import Curve, Device
from megatron_hexi.cost.compute import ATTENTION_BACKWARD, Speeds, device_speeds, logits_times, token_times
from megatron_hexi.cost.scan import whole_scan_times
from megatron_hexi.models.job import Job

#: Number of rows so large that bytes which are read or written once, such as weights, count nothing.
_ROWS = 2.0**40


def ceiling_tokens_per_s(job: Job, devices: Sequence[Device], causal: bool = True) -> float:
    """Return the tokens/s that some GPUs reach together at their best rates, without communication.

    If GPU d alone takes t_d seconds for an iteration's token work (or attention), all GPUs together take
    1 / sum(1 / t_d) for it, and attention follows token work. Since 1 / sum(1 / (a_d + b_d)) is never below
    the sum of both, this also bounds plans that give a GPU more of the work at which it is faster. GPUs of a
    job in fp8 may compute in bf16.
    """
    counts: dict[int, tuple[Device, int]] = {}
    for device in devices:
        counts[id(device)] = device, counts.get(id(device), (device, 0))[1] + 1
    token = attention = 0.0
    for device, count in counts.values():
        choices = (job, job.in_bf16) if job.precision == "fp8" else (job,)
        token += count / min(token_seconds(device_speeds(device, one), one) for one in choices)
        seconds = attention_seconds(device_speeds(device, job), job, causal)
        attention += count / seconds if seconds else math.inf  # a pattern may have an MLP in each layer
    return 1 / (1 / token + 1 / attention)


def token_seconds(speeds: Speeds, job: Job, with_experts: bool = True) -> float:
    """Return the seconds of one token through the whole model without attention, on one GPU.

    Args:
        with_experts: whether the GPU computes all the routed experts that the token goes to.
    """
    rows = np.array([_ROWS])
    best = replace(speeds, matmul=_best(speeds.matmul), output=_best(speeds.output))
    logits, layers = logits_times(best, job, rows), 0.0
    for kind, count in zip(job.kinds, job.model.layers_run, strict=True):
        layer = token_times(best, kind, rows)
        forward, backward = float(layer.forward[0]), float(layer.backward[0])
        if with_experts:
            active = sum(part.active * part.expert_matrices(kind.model) for part in kind.model.routed)
            rate = float(best.of_layers(kind).matmul.rates[0] * 1e12)
            routed = 2 * _ROWS * active / job.tensor_parallel / rate
            forward, backward = forward + routed, backward + (1 if job.lora_rank else 2) * routed
        layers += count * (forward * (1 + job.again.is_whole) + backward)
    return (layers + float(logits.forward[0] + logits.backward[0])) / _ROWS * job.tensor_parallel


def attention_seconds(speeds: Speeds, job: Job, causal: bool) -> float:
    """Return the seconds of one token's attention and scans through the whole model, on one GPU.

    Causal attention is 2 (D + V) H S / 2 FLOPs a layer forward.
    """
    kinds = list(zip(job.kinds, job.model.layers_run, strict=True))
    scans = sum(layers * _scan_seconds(speeds, kind) for kind, layers in kinds)
    seen = 0.0
    for kind, layers in kinds:
        keys = kind.keys_seen if causal else job.seq_length
        seen += layers * kind.model.mixer.attends * keys
    flops = 2 * (job.model.head_dim + job.model.value_dim) * job.model.heads * seen
    forward, backward = (
        max(max(getattr(passes, way).rates) for passes in (speeds.causal, speeds.full)) * 1e12
        for way in ("forward", "backward")
    )
    passes = 1 + ("core_attn" in job.again)
    return flops * (passes / forward + ATTENTION_BACKWARD / backward) + scans


def _scan_seconds(speeds: Speeds, job: Job) -> float:
    """Return the seconds of one token's scan in a layer, with all heads on one GPU.

    Only full recomputation repeats scans.
    """
    forward, backward = whole_scan_times(speeds, job, np.ones(1))
    once = float(forward[0]) * (1 + job.again.is_whole) + float(backward[0])
    return once * job.tensor_parallel / job.micro_batch_size


def _best(curve: Curve) -> Curve:
    return replace(curve, sizes=(1.0,), rates=(max(curve.rates),))
