"""Kernels and whole attention passes on CUDA tensors without a GPU: shapes, alignment, messages, no waits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from megatron_hexi.plan import Group, Mask, Member, Workload
from megatron_hexi.runtime.kernels import BlockKind, Mode
from megatron_hexi.runtime.kernels.base import aligned, aligned_log_sum_exp
from tests.support.fake_cuda import CUDA, HALF, HostWait, checked_kernel, fake_tensors, gpu, run_layer
from tests.support.kernels import ON_CUDA
from tests.support.plans import RANDOMS, SPARSE, TORN, examples, masks, one_replica, plans, workloads

BOTH = ("flash_attn", "flash_attn_interface")
#: Compute capability, packages and cuDNN.
MACHINES = [
    ((8, 0), (), 92000),
    ((8, 9), BOTH[:1], 92000),
    ((9, 0), (), 92000),
    ((9, 0), (), 92600),
    ((9, 0), BOTH, 92000),
    ((10, 0), (), 92000),
]
#: Sizes of heads that CUDA kernels take and that none takes; of values others, also odd ones.
SIZES = workloads(head_dims=(8, 64, 128, 20, 256), value_dims=(None, None, 3, 64, 200))


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: torch.ones(3).to(tensor.device),
    ],
    ids=["cpu", "item", "tolist", "nonzero", "boolean index", "from the host"],
)
def test_a_wait_for_the_device_is_an_error(wait):
    with fake_tensors():
        tensor = torch.empty(3, device=CUDA)
        with pytest.raises((HostWait, DataDependentOutputException, DynamicOutputShapeException)):
            wait(tensor)


@st.composite
def blocks(draw):
    """Query, key, value, gradient and log-sum-exp of a block, as slices of larger tensors, and causal."""
    random = draw(RANDOMS)
    batch, kv_heads, sharing = (random.randint(1, 3) for _ in range(3))
    queries, keys = (random.choice([1, 2, 63, 64, 65, 128, 192, 200, 320]) for _ in range(2))
    causal = random.random() < 0.4
    keys = queries if causal else keys
    size = random.choice([8, 64, 128, 192, 256])
    columns = size + random.choice([0, 0, 3, 8])  # values that travel beside keys
    first = random.choice([0, 0, 1, 5])  # rows before the block
    sizes = ((kv_heads * sharing, queries), (kv_heads, keys), (kv_heads, keys), (kv_heads * sharing, queries))
    return random.choice(HALF), batch, sizes, first, size, columns, causal


def of_block(block):
    dtype, batch, sizes, first, size, columns, causal = block
    tensors = [
        torch.empty(first + rows, batch, heads, columns, dtype=dtype, device=CUDA).permute(1, 2, 0, 3)[
            :, :, first:, :size
        ]
        for heads, rows in sizes
    ]
    (heads, rows), *_ = sizes
    log_sum_exp = torch.empty(batch, heads + 1, first + rows, device=CUDA)[:, 1:, first:]
    return tensors, log_sum_exp, Mode(causal, 0.1)


def check_block(block, machine, name):
    dtype, *_, size, _, _ = block
    with gpu(*machine), fake_tensors():
        tensors, log_sum_exp, mode = of_block(block)
        query, key, value, grad = map(aligned, tensors)
        kernel = checked_kernel(dtype, size, name).choose(
            BlockKind(query.shape, key.shape, mode.causal, CUDA)
        )
        output, _ = kernel.forward(query, key, value, mode)
        merged = aligned(output), aligned_log_sum_exp(log_sum_exp)
        kernel.backward(grad, query, key, value, *merged, mode)


block_cases = given(
    block=blocks(), machine=st.sampled_from(MACHINES), name=st.sampled_from(["auto", *ON_CUDA, "math"])
)


@block_cases
@examples(15)
def test_kernels_are_given_what_they_ask_for_and_give_what_is_asked(block, machine, name):
    check_block(block, machine, name)


@pytest.mark.slow
@block_cases
@examples(4000)
def test_kernels_are_given_it_in_many_more_cases(block, machine, name):
    check_block(block, machine, name)


@st.composite
def layers(draw, most_ranks):
    plan = draw(plans(SIZES, most_ranks))
    return plan, draw(masks(plan.workload))


def check_layer(layer, machine, batch, dtype, has_sinks, name):
    """Every rank's passes, and each pair's messages: as many, of the same sizes in the same order."""
    plan, mask = layer
    with gpu(*machine):
        wire = run_layer(plan, mask, batch, dtype, has_sinks, name)
    assert wire.sent == wire.received


def layer_cases(most_ranks):
    return given(
        layer=layers(most_ranks),
        machine=st.sampled_from(MACHINES),
        batch=st.integers(1, 2),
        dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]),
        has_sinks=st.booleans(),
        name=st.sampled_from(["auto", "auto", *ON_CUDA]),
    )


@layer_cases(most_ranks=4)
@examples(3)
def test_passes_of_any_plan_ask_kernels_for_what_they_take_and_never_wait(
    layer, machine, batch, dtype, has_sinks, name
):
    check_layer(layer, machine, batch, dtype, has_sinks, name)


@pytest.mark.slow
@layer_cases(most_ranks=8)
@examples(300)
def test_passes_of_many_more_plans_do(layer, machine, batch, dtype, has_sinks, name):
    check_layer(layer, machine, batch, dtype, has_sinks, name)


@pytest.mark.parametrize("plan", [TORN, SPARSE])
def test_passes_of_torn_heads_and_empty_ranks_do(plan):
    plan = replace(plan, workload=replace(plan.workload, head_dim=64))
    check_layer((plan, None), MACHINES[2], 1, torch.bfloat16, has_sinks=True, name="auto")


def test_batch_entries_with_documents_give_kernels_aligned_log_sum_exps():
    """The first group has 7 rows: the second entry's log-sum-exps begin at an odd number of floats."""
    segments = [((129, 136),), ((0, 72), (149, 175)), ((72, 129), (136, 149), (175, 199))]
    groups = [
        Group(own, (Member((rank,), sum(stop - start for start, stop in own), (0, 10)),))
        for rank, own in enumerate(segments)
    ]
    plan = one_replica(Workload(199, 10, 2, 128, value_dim=64), *groups, parts=4)
    mask = Mask(causal=True, window=7, documents=(199,))
    check_layer((plan, mask), MACHINES[0], 2, torch.bfloat16, has_sinks=False, name="auto")


def test_latent_attention_with_odd_values_gives_kernels_aligned_keys():
    """Rows of 128 + 3 columns travel: no row of keys but every eighth begins at 16 bytes."""
    plan = one_replica(
        Workload(24, 2, 2, 128, value_dim=3),
        Group(((0, 12),), (Member((0,), 6, (0, 1)), Member((1,), 6, (1, 2)))),
        Group(((12, 24),), (Member((2,), 12, (0, 2)),)),
    )
    check_layer((plan, None), MACHINES[0], 1, torch.bfloat16, has_sinks=False, name="auto")
