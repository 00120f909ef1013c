"""Latent attention in time, messages and memory, by hand and against the split tables."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import estimate
from megatron_hexi.cost.compute import (
    device_speeds,
    expansion_times,
    keys_merge_times,
    merge_times,
    own_block_times,
    token_times,
)
from megatron_hexi.cost.exchange import exchange_chunks
from megatron_hexi.cost.layer import message_bytes
from megatron_hexi.cost.layer_bytes import (
    Flights,
    attention_bytes,
    token_activation_bytes,
    token_qkv_bytes,
    working_set_bytes,
)
from megatron_hexi.cost.library_bytes import workspace_bytes
from megatron_hexi.cost.mixing import mixing_of
from megatron_hexi.cost.moved_bytes import layer_elements
from megatron_hexi.errors import ClusterError
from megatron_hexi.kinds import Latent
from megatron_hexi.plan import (
    LatentColumns,
    attention_traffic,
    build_schedule,
    proportional_plan,
)
from megatron_hexi.report.unit_summary import unit_summaries
from tests.support.costs import TINY, cluster, plan_arrays, products_by_hand, rate_alone, tiny_job
from tests.support.fleets import read_text
from tests.support.plans import examples, plans, workloads

#: 4 heads of 128 (32 of them rotary) and values of 96, made of 64 and 80 columns.
MODEL = dataclasses.replace(TINY, latent=Latent(kv_rank=64, rotary_dim=32, value_dim=96, query_rank=80))
JOB = tiny_job(model=MODEL)
NONE = Flights(np.zeros(1), np.zeros(1))


def one(value):
    return np.array([value], dtype=float)


@given(
    plans(workloads(head_dims=(3, 8), value_dims=(2, 9)), most_replicas=2), st.integers(1, 3), st.booleans()
)
@examples(150)
def test_bytes_are_those_that_the_plan_s_traffic_counts(plan, batch, travel):
    if travel:
        columns = LatentColumns(kv_rank=4, rotary_dim=1)
        workload = dataclasses.replace(plan.workload, kv_heads=plan.workload.heads, latent_exchange=columns)
        plan = dataclasses.replace(plan, workload=workload)
    workload = plan.workload
    # Sizes of a head are all that messages ask of a model.
    model = dataclasses.replace(
        TINY,
        heads=workload.heads,
        kv_heads=workload.heads,
        head_dim=workload.head_dim,
        latent=Latent(kv_rank=4, rotary_dim=1, value_dim=workload.value_dim),
    )
    job = tiny_job(model=model, micro_batch_size=batch, global_batch_size=batch, latent_exchange=travel)
    arrays = plan_arrays(plan)
    holder, taker = arrays.all_to_all_pairs
    sent = np.zeros((4, len(arrays.tokens)))
    for move in mixing_of(arrays, job).all_to_alls():
        np.add.at(sent[int(move.way == "backward")], holder if move.inward else taker, move.size)
    for chunk in exchange_chunks(arrays):
        size = message_bytes(arrays, job, chunk)
        np.add.at(sent[2], chunk.owner, size)
        np.add.at(sent[3], chunk.owner, size)
        np.add.at(sent[3], chunk.user, size)
    rows = unit_summaries(plan)
    for replica in plan.replicas:
        for index, member in enumerate(replica.domain.members):
            schedule = build_schedule(workload, replica.domain, index, plan.exchange.parts)
            sizes = workload.head_dim, batch, 2, workload.value_dim, sum(workload.exchanged_sizes)
            there, back = (
                attention_traffic(schedule, *sizes).forward,
                attention_traffic(schedule, *sizes).backward,
            )
            assert list(sent[:, member.number]) == [
                there.all_to_all_bytes,
                back.all_to_all_bytes,
                there.message_bytes,
                back.message_bytes,
            ]
            assert rows[member.number].forward.message_bytes * batch == there.message_bytes


def test_activations_by_hand():
    # Norms in and out 4 x 512, projection's input 4 x 96, MLP 2 x 2048; columns and the rotary ones 64 + 80 +
    # 32, and 64 + 80 behind norms.
    assert token_activation_bytes(JOB) == 2 * (4 * 512 + 4 * 96 + 2 * 2048 + 176 + 144)
    halves = dataclasses.replace(JOB, tensor_parallel=2)
    assert token_activation_bytes(halves) == token_activation_bytes(JOB) / 2
    rows = dataclasses.replace(halves, sequence_parallel=False)
    assert token_activation_bytes(rows) == 2 * (4 * 512 + 2 * 96 + 2 * 1024 + 176 + 144)
    assert token_qkv_bytes(JOB) == 2 * 4 * (128 + 128 + 96)


def test_norms_behind_attention_and_mlp_by_hand():
    plain, more = tiny_job(), tiny_job(model=dataclasses.replace(TINY, post_norms=True))
    assert token_activation_bytes(more) - token_activation_bytes(plain) == 2 * 2 * 512
    both = zip(layer_elements(more), layer_elements(plain), strict=True)
    assert [one - other for one, other in both] == [4 * 512, 6 * 512]


def test_attention_by_hand():
    # Query of 3 heads of 128, key and value of 3 of 128 + 96, output of 3 of 96.
    kept = 2 * 3 * (128 + 128 + 96 + 96) + 4 * 3
    assert attention_bytes(JOB, 10.0, one(100), one(3), one(3)) == [100 * kept]
    # Alone in its group the output is a part of one as wide as keys are.
    kept = 2 * 4 * (128 + 128 + 96 + 128) + 4 * 4
    assert attention_bytes(JOB, 100.0, one(100), one(4), one(4)) == [100 * kept]


def test_working_set_by_hand():
    qkv, own = 10 * 4 * 352, 100 * 3 * 352
    inside = 2 * (2 * (qkv + own) + 100 * 3 * 96 + own) + 2 * 2 * 100 * 6 * 128
    assert working_set_bytes(JOB, one(10), one(100), one(3), one(3), NONE, 1) == [inside]
    assert workspace_bytes(JOB, one(100), one(3), one(3)) == [100 * 3 * (128 * 4 + 4)]


def test_matrices_by_hand():
    down, up = 512 * (64 + 32 + 80), 4 * (80 * 128 + 64 * (96 + 96))
    mlp, projection = 2 * 512 * 2048, 512 * 4 * 96
    assert MODEL.matrix_params() == down + up + projection + mlp
    # Every rank has the matrices down, and runs them on its own rows.
    assert MODEL.matrix_params(2) == down + (up + projection + mlp) / 2
    (node,) = cluster([("a", "PLAIN", 1)]).nodes
    memory_s = 2 * 100 / (1000e9 * 0.9)
    for parallel, rows in ((False, down), (True, down / 2)):
        job = dataclasses.replace(JOB, tensor_parallel=2, sequence_parallel=parallel)
        times = token_times(device_speeds(node.device, job), job, one(100))
        matrices = 2 * 100 * (rows + (up + projection + mlp) / 2) / rate_alone(100e12)
        # Written: columns down of a rank's own rows, of two heads 128 and 96 + 96, of the MLP and twice 512.
        part = rows / down
        into = part * 512 + 80 + 64 + 2 * 96 + 512 + 1024
        out = part * 176 + 2 * 128 + 2 * 192 + 512 + 1024 + 512
        # Few rows: the products of the forward pass, and those that give gradients of inputs, read weights.
        held = down + (up + projection + mlp) / 2
        element = 2 / 900e9
        forward = max(matrices, (100 * into + held) * element) + 100 * out * element
        inputs = max(matrices, (100 * out + held) * element) + 100 * into * element
        weights = max(matrices, 100 * (into + out) * element) + held * 8 / 900e9
        assert times.forward == pytest.approx(forward + layer_elements(job)[0] * memory_s)
        assert times.backward == pytest.approx(inputs + weights + layer_elements(job)[1] * memory_s)


def test_elements_by_hand():
    turned, copied = (4 + 1) * 32, 2 * 4 * (2 * 128 + 96)
    assert layer_elements(JOB) == (
        2 * (2 * 512 + 144) + 6 * 512 + 2 * 2048 + 12 * turned + copied,
        3 * (2 * 512 + 144) + 6 * 512 + 3 * 2048 + 14 * turned + copied,
    )


def test_kernels_compute_the_wider_of_both_sizes():
    (node,) = cluster([("a", "PLAIN", 1)]).nodes
    wide = dataclasses.replace(MODEL, latent=Latent(kv_rank=64, rotary_dim=32, value_dim=200, query_rank=80))
    for model, width in ((MODEL, 128), (wide, 200)):
        job = tiny_job(model=model)
        speeds = device_speeds(node.device, job)
        times = own_block_times(speeds, job, one(1000), True)
        assert times.forward == pytest.approx(4 * width * 1000**2 / 2 / 100e12)
        assert times.backward == pytest.approx(2.5 * times.forward)


def test_merging_by_hand():
    (node,) = cluster([("a", "PLAIN", 1)]).nodes
    speeds = device_speeds(node.device, JOB)
    times = merge_times(speeds, JOB, one(100))
    assert times.forward == pytest.approx(100 * 18 * 96 / 900e9)
    assert times.backward == pytest.approx(100 * 10 * 128 / 900e9)
    assert keys_merge_times(speeds, JOB, one(100)) == pytest.approx(100 * 30 * 224 / 900e9)


def test_a_kernel_that_takes_no_such_heads_is_refused():
    (node,) = read_text(
        "name: one\nnodes:\n- {name: a, gpu: H100-SXM-80GB, gpus: 1}\n"
        "network: {bandwidth_gb_s: 25, latency_us: 10, per: gpu}\n"
    ).nodes
    wide = dataclasses.replace(MODEL, head_dim=192)
    with pytest.raises(ClusterError, match="takes heads of up to 128 columns, those of tiny have 192"):
        device_speeds(node.device, tiny_job(model=wide, kernel="cudnn"))
    device_speeds(node.device, tiny_job(model=MODEL, kernel="cudnn"))
    device_speeds(node.device, tiny_job(model=wide, kernel="flash-attn-2"))


#: Latent columns travel: 64 + 32 of them, in place of 4 x (128 + 96) of keys and values.
TRAVEL = dataclasses.replace(JOB, latent_exchange=True)


def products_of_few_columns(rows, into, out):
    """Seconds forward and backward of products, some of which take longer to read than to compute."""
    work = 2 * rows * into * out / rate_alone(100e12)
    read = (rows * into + into * out) * 2, (rows * out + into * out) * 2, rows * (into + out) * 2
    write = rows * out * 2, rows * into * 2, into * out * 8
    each = [max(work, one / 900e9) + other / 900e9 for one, other in zip(read, write, strict=True)]
    return each[0], each[1] + each[2]


def test_expansion_by_hand():
    (node,) = cluster([("a", "PLAIN", 1)]).nodes
    times = expansion_times(device_speeds(node.device, TRAVEL), TRAVEL, one(1000))
    there, back = products_of_few_columns(1000, 64, 96 + 96)
    memory = 2 * 1000 * (128 + 96) * 2 / 900e9
    assert times.forward == pytest.approx(there + memory)
    assert times.backward == pytest.approx(there + back + 2 * memory)
    merged = expansion_times(device_speeds(node.device, TRAVEL), TRAVEL, one(1000), merged=True)
    assert merged.forward == times.forward
    assert merged.backward - times.backward == pytest.approx(20 * 1000 * (128 + 96) / 900e9)


def test_a_token_s_own_work_loses_what_attention_gains():
    (node,) = cluster([("a", "PLAIN", 1)]).nodes
    speeds = device_speeds(node.device, JOB)
    plain, other = (token_times(speeds, job, one(1000)) for job in (JOB, TRAVEL))
    there, back = products_by_hand(1000, (64, 4 * (96 + 96)))
    # Queries, and columns that get their positions, are still put together.
    columns = 2 * 1000 * (64 + 32) * 2 / 900e9
    joined = 4 * 2 * 1000 * 224 * 2 / 900e9
    assert plain.forward - other.forward == pytest.approx(there + joined - columns)
    assert plain.backward - other.backward == pytest.approx(back + joined - columns)


def test_attention_keeps_columns_by_hand():
    kept = 2 * (3 * (128 + 96) + 96) + 4 * 3
    assert attention_bytes(TRAVEL, 10.0, one(100), one(3), one(1)) == [100 * kept]
    assert token_qkv_bytes(TRAVEL) == 2 * (4 * 128 + 96)


def test_working_set_where_columns_travel_by_hand():
    qkv, own = 10 * (4 * 128 + 96), 100 * (3 * 128 + 96)
    inside = 2 * (2 * (qkv + own) + 100 * 3 * 96 + own) + 2 * 2 * 100 * 6 * 128
    made = 3 * 2 * 100 * 3 * (128 + 96) + (4 + 2 * 2) * 4 * 64 * (96 + 96)
    flights = NONE
    assert working_set_bytes(TRAVEL, one(10), one(100), one(3), one(1), flights, 1) == [inside + made]


@pytest.mark.parametrize(("bandwidth", "travel"), [(1, True), (100_000, False)])
def test_columns_travel_where_the_network_is_slow(bandwidth, travel):
    nodes = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], bandwidth=bandwidth)
    seconds = {}
    for job in (JOB, TRAVEL):
        plan = proportional_plan(job.workload(), [[[1], [1]]])
        seconds[job.latent_exchange] = estimate(plan, job, nodes).iteration_s
    assert min(seconds, key=seconds.__getitem__) is travel
