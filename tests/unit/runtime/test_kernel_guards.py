"""What a kernel must not be given goes to another one, block by block; and what deterministic mode leaves."""

import pytest
import torch

from megatron_hexi.errors import PlatformError
from megatron_hexi.runtime.kernels import BlockKind, Mode, select_kernel
from tests.support.fake_cuda import CUDA, fake_tensors, gpu

CUDNN = {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"}
FLASH = {"_flash_attention_forward", "_flash_attention_backward"}
HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


def operators(queries, keys, causal, capability=HOPPER, cudnn=92400, batch=2, heads=4):
    """The attention operators of torch that are called for a block with ``--hexi-kernel cudnn``."""
    with gpu(capability, cudnn=cudnn), fake_tensors() as operations:
        query, key, value = (
            torch.empty(batch, heads, rows, 64, dtype=torch.bfloat16, device=CUDA)
            for rows in (queries, keys, keys)
        )
        block = BlockKind(query.shape, key.shape, causal, CUDA)
        kernel = select_kernel("cudnn", CUDA, torch.bfloat16, 64).choose(block)
        output, log_sum_exp = kernel.forward(query, key, value, Mode(causal, 0.1))
        grads = kernel.backward(output, query, key, value, output, log_sum_exp, Mode(causal, 0.1))
        assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]
    return operations.called & (CUDNN | FLASH)


@pytest.mark.parametrize(
    ("block", "machine"),
    [
        pytest.param((64, 1, False), {}, id="one key"),
        pytest.param((1, 1, True), {}, id="one token"),
        pytest.param((1, 128, False), {}, id="one query"),
        pytest.param((1, 128, False), {"cudnn": 92600}, id="one query, cuDNN 9.26"),
        pytest.param((1, 128, False), {"capability": BLACKWELL}, id="one query, Blackwell"),
        pytest.param((256, 64, False), {}, id="half a tile of keys"),
        pytest.param((256, 704, False), {}, id="the last tile of keys is half full"),
        pytest.param((100, 256, False), {"cudnn": 91002}, id="queries that 128 does not divide, cuDNN 9.10"),
        pytest.param((128, 128, False), {"batch": 65536, "heads": 1}, id="a large batch"),
    ],
)
def test_cudnn_is_not_given_what_it_does_not_support(block, machine):
    assert operators(*block, **machine) == FLASH


@pytest.mark.parametrize(
    ("block", "machine"),
    [
        pytest.param((128, 128, False), {}, id="whole tiles"),
        pytest.param((128, 130, False), {}, id="a last tile of two keys"),
        pytest.param((704, 704, True), {}, id="half a tile, causal"),
        pytest.param((256, 704, False), {"cudnn": 92600}, id="half a tile, cuDNN 9.26"),
        pytest.param((256, 704, False), {"capability": BLACKWELL}, id="half a tile, Blackwell"),
        pytest.param((256, 704, False), {"capability": AMPERE}, id="half a tile, Ampere"),
        pytest.param((128, 200, False), {"cudnn": 91002}, id="whole tiles of queries, cuDNN 9.10"),
    ],
)
def test_cudnn_is_given_all_else(block, machine):
    assert operators(*block, **machine) == CUDNN


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


BOTH = ("flash_attn", "flash_attn_interface")


@pytest.mark.parametrize(("packages", "chosen"), [((), "aten-flash"), (BOTH, "flash-attn-2")])
def test_deterministic_mode_takes_deterministic_kernels(packages, chosen, deterministic):
    with gpu(HOPPER, packages):
        assert select_kernel("auto", CUDA, torch.bfloat16, 128).name == chosen


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cudnn", "its backward is not deterministic"),
        ("flash-attn-3", "not every release has a deterministic backward, and they cannot be told apart"),
    ],
)
def test_deterministic_mode_refuses_others_by_name(name, reason, deterministic):
    with gpu(HOPPER, BOTH), pytest.raises(PlatformError) as refused:
        select_kernel(name, CUDA, torch.bfloat16, 128)
    assert str(refused.value) == (
        f"kernel {name}: {reason}; for torch.bfloat16 with heads of 128 on cuda use: "
        "flash-attn-2, aten-flash, math"
    )


def test_where_torch_only_warns_kernels_stay_as_they_are():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with gpu(HOPPER):
            assert select_kernel("auto", CUDA, torch.bfloat16, 128).name == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cudnn_that_torch_refuses_is_left_to_other_kernels(monkeypatch):
    """torch raises where the library that was loaded is older than the one that it was built with."""

    def refuse():
        raise RuntimeError("cuDNN version incompatibility")

    with gpu(HOPPER):
        monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
        assert select_kernel("auto", CUDA, torch.bfloat16, 128).name == "aten-flash"
        with pytest.raises(PlatformError, match=r"export LD_LIBRARY_PATH=[^:]+:"):
            select_kernel("cudnn", CUDA, torch.bfloat16, 128)
