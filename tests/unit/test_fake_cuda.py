"""Kernels and whole attention passes on CUDA tensors without a GPU: shapes, alignment, messages, no waits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.plan import Workload
from megatron_hexi.runtime.kernels import KERNEL_NAMES
from tests.support.fake_cuda import (
    CUDA,
    CheckedKernel,
    HostWait,
    checked_kernel,
    fake_tensors,
    gpu,
    run_layer,
)
from tests.support.kernels import BY_NAME, ON_CUDA
from tests.support.plans import RAGGED, RANDOMS, SPARSE, TORN, examples, masks, one_replica, plans, workloads

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
#: Sizes that CUDA kernels take and that none takes; of values others, also odd ones.
SIZES = workloads(head_dims=(8, 64, 128, 20, 256), value_dims=(None, None, 3, 64, 200))


@st.composite
def layers(draw):
    plan = draw(plans(SIZES))
    return plan, draw(masks(plan.workload))


def check_layer(layer, machine, batch, dtype, has_sinks, name):
    """Every rank's passes, and each pair's messages: as many, of the same sizes in the same order."""
    with gpu(*machine):
        wire = run_layer(*layer, batch, dtype, has_sinks, name)
    assert wire.sent == wire.received


layer_cases = given(
    layer=layers(),
    machine=st.sampled_from(MACHINES),
    batch=st.integers(1, 2),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    has_sinks=st.booleans(),
    name=st.sampled_from(["auto", *KERNEL_NAMES]),
)


@layer_cases
@examples(30)
def test_every_rank_of_any_plan_asks_kernels_for_what_they_take_and_waits_for_no_device(
    layer, machine, batch, dtype, has_sinks, name
):
    check_layer(layer, machine, batch, dtype, has_sinks, name)


@pytest.mark.slow
@layer_cases
@examples(1500)
def test_many_more_plans_do(layer, machine, batch, dtype, has_sinks, name):
    check_layer(layer, machine, batch, dtype, has_sinks, name)


@pytest.mark.parametrize("plan", [TORN, RAGGED, SPARSE])
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_plans_with_torn_heads_do(plan, machine):
    check_layer((plan, None), machine, 2, torch.bfloat16, has_sinks=True, name="auto")
