"""Compute terms by hand, on a GPU of 100 TFLOP/s (1e14) with memory at 0.9 x 1e12 bytes/s."""

import dataclasses
import re

import numpy as np
import pytest

from megatron_hexi.cluster import Curve, device
from megatron_hexi.cost.ceiling import ceiling_tokens_per_s
from megatron_hexi.cost.compute import (
    device_speeds,
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
from megatron_hexi.cost.moved_bytes import (
    gradient_bytes,
    layer_elements,
    loss_bytes,
    shard_step_bytes,
    step_bytes,
)
from megatron_hexi.cost.products import Elements, Products, product_seconds
from megatron_hexi.errors import ClusterError, HexiError
from tests.support.costs import TINY, TINY_PRODUCTS, cluster, products_by_hand, rate_alone, tiny_job

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
        device_speeds(PLAIN, tiny_job()), matmul=Curve((1.0, 100.0), (50.0, 100.0), "test"), memory=1e40
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
    # Gradients of queries, keys and values are put together besides: 2 x 1536.
    backward = 12 * 512 + 3 * 2048 + 2048 + 2 * 1536
    there, back = products_by_hand(1000, *TINY_PRODUCTS)
    assert times.forward == pytest.approx([0, there + 1000 * 2 * forward / MEMORY])
    assert times.backward == pytest.approx([0, back + 1000 * 2 * backward / MEMORY])


def test_token_work_with_tensor_parallelism_is_shared():
    job = tiny_job(tensor_parallel=2)
    shared = token_times(device_speeds(PLAIN, job), job, at(1000)).forward
    there, _ = products_by_hand(1000, (512, 768), (256, 512), (512, 1024), (1024, 512))
    assert shared == pytest.approx(there + 1000 * 2 * (10 * 512 + 2 * 2048 + 2048) / 2 / MEMORY)
    # Without sequence parallelism each rank has the norms of all rows.
    job = tiny_job(tensor_parallel=2, sequence_parallel=False)
    apart = token_times(device_speeds(PLAIN, job), job, at(1000)).forward
    assert apart == pytest.approx(shared + 1000 * 2 * 10 * 256 / MEMORY)


def test_few_rows_take_as_long_as_reading_weights_and_adding_up_their_gradients():
    times = token_times(device_speeds(PLAIN, tiny_job()), tiny_job(), at(1))
    forward, backward = layer_elements(tiny_job())
    into, out = 3 * 512 + 2048, 1536 + 512 + 2048 + 512
    read = 2 * (into + 3145728) + 2 * out + 2 * forward
    assert times.forward == pytest.approx(read / MEMORY)
    both = 2 * (out + 3145728) + 2 * into + 2 * (into + out) + 8 * 3145728 + 2 * backward
    assert times.backward == pytest.approx(both / MEMORY, rel=0.01)


@pytest.mark.parametrize("name", ["A100-SXM-80GB", "H100-SXM-80GB", "B200-180GB"])
def test_narrow_products_and_few_rows_take_longer_by_flop(name):
    speeds = device_speeds(device(name), tiny_job())

    def each(rows, inner, outer):
        sizes, rows = Products.of(inner, outer), at(rows)
        forward, backward = product_seconds(
            rates(speeds.matmul, rows), speeds.memory, rows, sizes, Elements.of(tiny_job())
        )
        return float(forward[0] + backward[0]) / (inner * outer * rows[0])

    assert each(16384, 4096, 16384) < each(16384, 512, 2048) < each(256, 512, 2048)
    assert each(16384, 4096, 16384) < each(1024, 4096, 16384) < each(64, 4096, 16384)


#: TFLOP/s of three products of a linear layer on an H100: docs/results/one-gpu.md.
SWEEP = {
    (4096, 6144): {512: 629, 1024: 688, 2048: 729, 4096: 705, 8192: 700, 16384: 669},
    (4096, 4096): {512: 613, 1024: 677, 2048: 700, 4096: 712, 8192: 698, 16384: 675},
    (4096, 28672): {512: 618, 1024: 669, 2048: 697, 4096: 734, 8192: 656, 16384: 699},
    (14336, 4096): {512: 622, 1024: 682, 2048: 691, 4096: 698, 8192: 674, 16384: 681},
    (8192, 57344): {512: 637, 1024: 682, 2048: 703, 4096: 670, 8192: 702, 16384: 708},
    (1024, 3072): {4096: 680, 8192: 676, 16384: 669},
    (2048, 1536): {4096: 690, 8192: 688, 16384: 684},
    (768, 2048): {8192: 626, 16384: 629},
}


def test_products_by_size_are_those_of_a_sweep_on_an_h100():
    speeds = device_speeds(device("H100-SXM-80GB"), tiny_job())
    plain = Elements(factor=2, result=2, gradient=2)  # written, not added up
    errors = []
    for (inner, outer), found in SWEEP.items():
        for count, measured in found.items():
            rows = at(count)
            times = product_seconds(
                rates(speeds.matmul, rows), speeds.memory, rows, Products.of(inner, outer), plain
            )
            errors.append(
                6 * count * inner * outer / float(times.forward[0] + times.backward[0]) / 1e12 / measured - 1
            )
    assert abs(np.median(errors)) < 0.05
    assert max(map(abs, errors)) < 0.15


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
    there, back = products_by_hand(1000, (512, 1024))
    assert times.forward == pytest.approx(there + 38 * 1000 * 1024 / MEMORY)
    assert times.backward == pytest.approx(back + 14 * 1000 * 1024 / MEMORY)


def test_adapters_by_hand():
    rank, rows = 16, 1000
    job, whole = tiny_job(lora_rank=rank), tiny_job()
    speeds = device_speeds(PLAIN, job)
    columns = sum(into + out for into, out in TINY_PRODUCTS)
    assert job.trained_share == TINY.layers * rank * columns / TINY.total_params
    found, trained = token_times(speeds, job, at(rows)), token_times(speeds, whole, at(rows))
    forward = backward = 0.0
    for into, out in TINY_PRODUCTS:
        # Both products of an adapter are bound by reading and writing rows, all but one of few columns.
        rate, held, each = rate_alone(100e12), rank * (into + out), 2 / MEMORY
        work = 2 * rows * held / rate
        forward += max(work, (rows * into + held) * each) + rows * out * each + 5 * rows * out * each
        backward += max(work, (rows * out + held) * each) + rows * into * each
        backward += max(work, rows * (into + out) * each) + held * 8 / MEMORY
        backward += (2 * out + 3 * into) * rows * each
        # Without the gradients of frozen weights.
        backward -= max(2 * rows * into * out / rate, rows * (into + out) * each) + into * out * 8 / MEMORY
    assert found.forward == pytest.approx(trained.forward + forward, rel=0.02)
    assert found.backward == pytest.approx(trained.backward + backward, rel=0.02)
    logits, all_logits = (logits_times(speeds, one, at(rows)) for one in (job, whole))
    assert logits.forward == all_logits.forward
    frozen = 2 * rows * 512 * 1024 / rate_alone(100e12) + 512 * 1024 * 8 / MEMORY
    assert all_logits.backward - logits.backward == pytest.approx(frozen)
    for of_adapters, of_all in zip(step_bytes(job), step_bytes(whole), strict=True):
        assert of_adapters == pytest.approx(job.trained_share * of_all)


def test_optimizer_by_hand():
    speeds = device_speeds(PLAIN, tiny_job())
    # Gradients: cleared 4, scaled 8, searched for NaN 4; norm 4, clipped 8, Adam 28, the weight in 16 bits 6.
    assert optimizer_seconds(speeds, tiny_job(), 1000, 250.0) == pytest.approx((16000 + 46 * 250) / MEMORY)
    full = tiny_job(precision="fp32")
    assert optimizer_seconds(speeds, full, 1000, 1000.0) == pytest.approx(56000 / MEMORY)
    assert step_bytes(tiny_job(precision="fp16")) == (8, 60)
    # torch's: clipped 16, and Adam in eight kernels.
    unfused = tiny_job(unfused=("optimizer",))
    assert step_bytes(unfused) == (16, 106)
    # Host memory's is fused whatever the GPU's is.
    assert shard_step_bytes(unfused) == 46


def test_operations_in_several_kernels_by_hand():
    gated = dataclasses.replace(TINY, gated=True, kv_heads=2)
    fused, apart = (
        tiny_job(model=gated, unfused=unfused) for unfused in ((), ("norms", "rotary", "activation"))
    )
    more = [many - one for many, one in zip(layer_elements(apart), layer_elements(fused), strict=True)]
    # Six heads turn: ten and twelve times more; norms twice more backward; of the gate 2 and 8 of 2048.
    assert more == [10 * 6 * 128 + 2 * 2048, 12 * 6 * 128 + 4 * 512 + 8 * 2048]
    # Queries of grouped heads are copied, and gradients put together of 4 + 2 x 2 heads.
    grouped = dataclasses.replace(TINY, kv_heads=2)
    for way, copied in enumerate((2 * 512 - 2 * 256, -2 * 256 - 2 * 512)):
        found = [layer_elements(tiny_job(model=model))[way] for model in (grouped, TINY)]
        assert found[0] - found[1] == copied
    # Learned positions do not turn.
    learned = tiny_job(model=dataclasses.replace(TINY, learned_positions=4096))
    rotary = [
        more - less for more, less in zip(layer_elements(tiny_job()), layer_elements(learned), strict=True)
    ]
    assert rotary == [2 * 1024, 2 * 1024]
    assert [sum(loss_bytes(job)) for job in (tiny_job(), fused)] == [52 * 1024, 28 * 1024]
    # Written and read in 16 bits before they are added.
    assert [gradient_bytes(tiny_job(unfused=unfused)) for unfused in ((), ("gradients",))] == [8, 12]
    with pytest.raises(HexiError, match="unfused"):
        tiny_job(unfused=("everything",))


def test_head_sizes():
    assert [head_size_factor(size) for size in (128, 256)] == [1, 1]
    assert head_size_factor(64) == pytest.approx(0.779, abs=0.001)
    small = dataclasses.replace(TINY, head_dim=64)
    speeds = device_speeds(PLAIN, tiny_job(model=small))
    assert speeds.causal.forward.rate(1) == pytest.approx(77.9, abs=0.1)
    assert speeds.matmul.rate(1) == pytest.approx(rate_alone(100e12) / 1e12)


def test_precisions():
    half = device_speeds(PLAIN, tiny_job(precision="fp16"))
    assert half.matmul.rate(1) == pytest.approx(rate_alone(100e12) / 1e12)
    slow = device_speeds(PLAIN, tiny_job(precision="fp32"))
    assert slow.matmul.rate(1) == pytest.approx(rate_alone(10e12, element=4) / 1e12)
    assert slow.full.backward.rate(1) == 10
    said = "T4-16GB: no bf16 on this GPU; use precision fp16 or fp32"
    with pytest.raises(ClusterError, match=re.escape(said)):
        device_speeds(device("T4-16GB"), tiny_job())
    with pytest.raises(ClusterError, match="no curves for kernel cudnn"):
        device_speeds(PLAIN, tiny_job(kernel="cudnn"))


def test_products_reach_a_share_of_the_catalogues_best():
    known, job = device("H100-SXM-80GB"), tiny_job()
    # What a cluster file says of matrix products itself is taken as it is.
    measured = dataclasses.replace(known, layer_share=1.0)
    slow, fast = (device_speeds(one, job).matmul.rate(8192) for one in (known, measured))
    assert known.layer_share == 0.875
    assert slow == pytest.approx(fast * 0.875, rel=0.02)


def test_ceiling_by_hand():
    job = tiny_job()
    elements = 2 * (10 * 512 + 4096 + 2048 + 12 * 512 + 3 * 2048 + 2048 + 2 * 1536)
    # Of very many rows, whose gradients of weights count nothing.
    layer = sum(products_by_hand(1, *TINY_PRODUCTS, gradient=0)) + elements / MEMORY
    token = 2 * layer + sum(products_by_hand(1, (512, 1024), gradient=0)) + 52 * 1024 / MEMORY
    attention = 2 * 4 * 128 * 4 * 2048 * 3.5 / 1e14
    one = 1 / (token + attention)
    assert ceiling_tokens_per_s(job, [PLAIN]) == pytest.approx(one)
    assert ceiling_tokens_per_s(job, [PLAIN] * 3) == pytest.approx(3 * one)
    assert ceiling_tokens_per_s(tiny_job(recompute="selective"), [PLAIN]) == pytest.approx(
        1 / (token + attention * 4.5 / 3.5)
    )
