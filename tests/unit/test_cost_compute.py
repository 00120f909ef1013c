"""Compute terms by hand, on a GPU of 100 TFLOP/s (1e14) with memory at 0.9 x 1e12 bytes/s."""

import dataclasses
import re

import numpy as np
import pytest

from megatron_hexi.cluster import Curve, device
from megatron_hexi.cost.ceiling import ceiling_tokens_per_s
from megatron_hexi.cost.compute import (
    device_speeds,
    elementwise_elements,
    head_size_factor,
    keys_merge_times,
    logits_times,
    merge_times,
    optimizer_seconds,
    own_block_times,
    rates,
    rectangle_times,
    token_times,
)
from megatron_hexi.errors import ClusterError
from tests.support.costs import TINY, cluster, tiny_job

PLAIN = cluster([("a", "PLAIN", 1)]).ranks[0].device
MEMORY = 0.9e12


def at(*values):
    return np.array(values, dtype=float)


def test_rates_of_arrays_are_those_of_the_curve():
    for curve in device("H100-SXM-80GB").curves.values():
        sizes = at(0.5, 1, 7, 300, 4096, 10000, 1e6)
        assert rates(curve, sizes) == pytest.approx([curve.rate(size) * 1e12 for size in sizes])


def test_rates_are_taken_at_the_size():
    speeds = dataclasses.replace(
        device_speeds(PLAIN, tiny_job()), matmul=Curve((1.0, 100.0), (50.0, 100.0), "test"), memory=1e30
    )
    times = token_times(speeds, tiny_job(), at(10, 100))
    # Halfway between in the logarithm: 75 TFLOP/s.
    assert times.forward == pytest.approx([2 * 10 * 3145728 / 75e12, 2 * 100 * 3145728 / 100e12])
    assert times.backward == pytest.approx(2 * times.forward)


def test_token_work_by_hand():
    job = tiny_job()
    times = token_times(device_speeds(PLAIN, job), job, at(0, 1000))
    # Elements a row: norms 4 x 512, residuals 6 x 512, activation 2 x 2048, rotary 2 x 128 x 8.
    forward = 10 * 512 + 2 * 2048 + 2048
    backward = 12 * 512 + 3 * 2048 + 2048
    matrices = 2 * 1000 * 3145728 / 1e14
    assert times.forward == pytest.approx([0, matrices + 1000 * 2 * forward / MEMORY])
    assert times.backward == pytest.approx([0, 2 * matrices + 1000 * 2 * backward / MEMORY])


def test_token_work_with_tensor_parallelism_is_shared():
    job = tiny_job(tensor_parallel=2)
    whole = token_times(device_speeds(PLAIN, tiny_job()), tiny_job(), at(1000))
    assert token_times(device_speeds(PLAIN, job), job, at(1000)).forward == pytest.approx(whole.forward / 2)
    # Without sequence parallelism each rank has the norms of all rows.
    job = tiny_job(tensor_parallel=2, sequence_parallel=False)
    apart = token_times(device_speeds(PLAIN, job), job, at(1000)).forward
    assert apart == pytest.approx(whole.forward / 2 + 1000 * 2 * 10 * 256 / MEMORY)


def test_own_block_by_hand():
    speeds = device_speeds(PLAIN, tiny_job())
    causal = own_block_times(speeds, tiny_job(), at(0, 1000), causal=True)
    assert causal.forward == pytest.approx([0, 4 * 128 * 1000**2 / 2 / 1e14])
    assert causal.backward == pytest.approx(2.5 * causal.forward)
    full = own_block_times(speeds, tiny_job(), at(0, 1000), causal=False)
    assert full.forward == pytest.approx(2 * causal.forward)
    twice = own_block_times(
        speeds, tiny_job(micro_batch_size=2, global_batch_size=2), at(0, 1000), causal=True
    )
    assert twice.forward == pytest.approx(2 * causal.forward)


def test_rectangles_run_as_the_square_of_their_area():
    speeds = device_speeds(device("H100-SXM-80GB"), tiny_job())
    times = rectangle_times(speeds, tiny_job(), at(4000, 0), at(1000, 0))
    rate = device("H100-SXM-80GB").attention().full.forward.rate(2000) * 1e12
    assert times.forward == pytest.approx([4 * 128 * 4000 * 1000 / rate, 0])


def test_merging_by_hand():
    speeds = device_speeds(PLAIN, tiny_job())
    merge = merge_times(speeds, tiny_job(), at(1000))
    assert merge.forward == pytest.approx(18 * 128 * 1000 / MEMORY)
    assert merge.backward == pytest.approx(10 * 128 * 1000 / MEMORY)
    assert keys_merge_times(speeds, tiny_job(), at(500)) == pytest.approx(30 * 2 * 128 * 500 / MEMORY)


def test_logits_by_hand():
    times = logits_times(device_speeds(PLAIN, tiny_job()), tiny_job(), at(1000))
    matrix = 2 * 1000 * 512 * 1024 / 1e14
    assert times.forward == pytest.approx(matrix + 38 * 1000 * 1024 / MEMORY)
    assert times.backward == pytest.approx(2 * matrix + 14 * 1000 * 1024 / MEMORY)


def test_optimizer_by_hand():
    speeds = device_speeds(PLAIN, tiny_job())
    assert optimizer_seconds(speeds, tiny_job(), 1000, 250.0) == pytest.approx((4000 + 34 * 250) / MEMORY)
    full = tiny_job(precision="fp32")
    assert optimizer_seconds(speeds, full, 1000, 1000.0) == pytest.approx(36000 / MEMORY)


def test_head_sizes():
    assert [head_size_factor(size) for size in (128, 256)] == [1, 1]
    assert head_size_factor(64) == pytest.approx(0.779, abs=0.001)
    small = dataclasses.replace(TINY, head_dim=64)
    speeds = device_speeds(PLAIN, tiny_job(model=small))
    assert speeds.causal.forward.rate(1) == pytest.approx(77.9, abs=0.1)
    assert speeds.matmul.rate(1) == 100


def test_precisions():
    assert device_speeds(PLAIN, tiny_job(precision="fp16")).matmul.rate(1) == 100
    slow = device_speeds(PLAIN, tiny_job(precision="fp32"))
    assert (slow.matmul.rate(1), slow.full.backward.rate(1)) == (10, 10)
    said = "T4-16GB: no bf16 on this GPU; use precision fp16 or fp32"
    with pytest.raises(ClusterError, match=re.escape(said)):
        device_speeds(device("T4-16GB"), tiny_job())
    with pytest.raises(ClusterError, match="no curves for kernel cudnn"):
        device_speeds(PLAIN, tiny_job(kernel="cudnn"))


def test_a_layer_reaches_a_share_of_the_catalogues_best_products():
    # Zorse's profile of a layer on an A100-80: 201 TFLOP/s forward, 200 backward, in 2 P S + 4 S^2 h FLOPs, P
    # weights, of a 7B's layer (arXiv 2507.10392).
    seven = dataclasses.replace(
        TINY, hidden_size=4096, heads=32, kv_heads=32, ffn_hidden_size=11008, gated=True
    )
    job = tiny_job(model=seven, precision="fp16")
    speeds = device_speeds(device("A100-SXM-80GB"), job)
    rows = np.array([4096.0])
    token, head = token_times(speeds, job, rows), own_block_times(speeds, job, rows, True)
    flops = 2 * seven.matrix_params() * 4096 + 4 * 4096**2 * 4096
    forward, backward = (float((t + 32 * h)[0]) for t, h in zip(token, head, strict=True))
    assert flops / forward / 1e12 == pytest.approx(201, rel=0.02)
    assert 2 * flops / backward / 1e12 == pytest.approx(200, rel=0.02)
    # What a cluster file says of matrix products itself is taken as it is.
    assert device_speeds(PLAIN, tiny_job()).matmul.rate(1) == 100


def test_fp8_is_of_the_layers_matrices():
    job, h100 = tiny_job(precision="fp8"), device("H100-SXM-80GB")
    speeds, usual = device_speeds(h100, job), device_speeds(h100, tiny_job())
    assert speeds.matmul.rate(4096) == pytest.approx(0.75 * 1402.6)
    assert (speeds.output, speeds.causal, speeds.full) == (usual.matmul, usual.causal, usual.full)
    # Casts: 4 bytes of the projection's input; of three gradients of 512 and of two residuals of 512.
    forward, backward = elementwise_elements(tiny_job())
    assert elementwise_elements(job) == (forward + 2 * 512, backward + 2 * (3 * 512 + 2 * 512))
    # The optimizer makes two copies of the weights in fp8.
    more = optimizer_seconds(speeds, job, 1000, 0.0) - optimizer_seconds(usual, tiny_job(), 1000, 0.0)
    assert more == pytest.approx(4000 / usual.memory)
    with pytest.raises(ClusterError, match="A100-SXM-80GB: no fp8 on this GPU; use precision bf16"):
        device_speeds(device("A100-SXM-80GB"), job)
    with pytest.raises(ClusterError, match="L40S-48GB: no fp8 rate is known for this GPU"):
        device_speeds(device("L40S-48GB"), job)


def test_ceiling_by_hand():
    job = tiny_job()
    elements = 2 * (10 * 512 + 4096 + 2048 + 12 * 512 + 3 * 2048 + 2048)
    layer = 6 * 3145728 / 1e14 + elements / MEMORY
    token = 2 * layer + 6 * 512 * 1024 / 1e14 + 52 * 1024 / MEMORY
    attention = 2 * 4 * 128 * 4 * 2048 * 3.5 / 1e14
    one = 1 / (token + attention)
    assert ceiling_tokens_per_s(job, [PLAIN]) == pytest.approx(one)
    assert ceiling_tokens_per_s(job, [PLAIN] * 3) == pytest.approx(3 * one)
    assert ceiling_tokens_per_s(tiny_job(recompute="selective"), [PLAIN]) == pytest.approx(
        1 / (token + attention * 4.5 / 3.5)
    )
