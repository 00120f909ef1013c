"""Which kernel is taken, and what is said where none will do."""

import pytest
import torch

from megatron_hexi.errors import PlatformError
from megatron_hexi.runtime import KERNEL_NAMES, select_kernel
from megatron_hexi.runtime.kernels import flash_attn as flash_attn_adapter
from tests.support.kernels import (
    BY_NAME,
    ON_CPU,
    ON_CUDA,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_auto_takes_the_kernel_of_torch(dtype):
    assert select_kernel("auto", CPU, dtype, 17).name == "aten-cpu"


@pytest.mark.parametrize("name", ON_CPU)
def test_a_kernel_can_be_asked_for_by_name(name):
    assert select_kernel(name, CPU, torch.float32, 64).name == name


def test_flags_offer_auto_and_every_kernel():
    assert KERNEL_NAMES == ("auto", "flash-attn-3", "cudnn", "flash-attn-2", "aten-flash", "aten-cpu", "math")


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_cuda_kernel_refuses_the_cpu_and_says_what_would_do(name):
    with pytest.raises(PlatformError) as caught:
        select_kernel(name, CPU, torch.bfloat16, 64)
    assert str(caught.value) == (
        f"kernel {name}: it runs on CUDA, the tensors are on cpu; "
        "for torch.bfloat16 with heads of 64 on cpu use: aten-cpu, math"
    )


def test_an_unknown_kernel_is_refused_with_those_there_are():
    with pytest.raises(
        PlatformError, match=r"kernel flash: there is none of that name; .* use: aten-cpu, math"
    ):
        select_kernel("flash", CPU, torch.float32, 64)


def test_auto_refuses_where_nothing_will_do():
    with pytest.raises(PlatformError, match=r"torch\.int64 with heads of 64 on cpu use: none"):
        select_kernel("auto", CPU, torch.int64, 64)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU of some capability and some packages, as far as the choice looks at it."""

    def pretend(capability, packages=()):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(flash_attn_adapter, "find_spec", lambda name: name if name in packages else None)

    return pretend


BOTH = ("flash_attn", "flash_attn_interface")


@pytest.mark.parametrize(
    ("capability", "packages", "dtype", "head_dim", "chosen"),
    [
        ((9, 0), BOTH, torch.bfloat16, 128, "flash-attn-3"),
        ((9, 0), BOTH[:1], torch.bfloat16, 128, "cudnn"),
        ((9, 0), BOTH, torch.float16, 256, "flash-attn-3"),
        ((9, 0), BOTH[:1], torch.float16, 256, "flash-attn-2"),
        ((9, 0), (), torch.bfloat16, 192, "aten-flash"),
        ((10, 0), BOTH, torch.bfloat16, 128, "cudnn"),
        ((8, 0), BOTH, torch.bfloat16, 64, "flash-attn-2"),
        ((8, 9), (), torch.bfloat16, 64, "aten-flash"),
        ((12, 0), (), torch.bfloat16, 128, "aten-flash"),
        ((8, 9), (), torch.bfloat16, 200, "math"),
        ((8, 0), (), torch.bfloat16, 200, "aten-flash"),
        ((8, 0), (), torch.bfloat16, 20, "math"),
        ((8, 0), BOTH, torch.bfloat16, 264, "math"),
        ((9, 0), BOTH, torch.float32, 128, "math"),
        ((7, 5), BOTH, torch.float16, 64, "math"),
    ],
)
def test_on_cuda_auto_takes_the_fastest_that_is_there(gpu, capability, packages, dtype, head_dim, chosen):
    gpu(capability, packages)
    assert select_kernel("auto", CUDA, dtype, head_dim).name == chosen


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "head_dim", "reason"),
    [
        ("flash-attn-3", (9, 0), torch.bfloat16, 64, "the package flash_attn_interface is not installed"),
        ("flash-attn-2", (8, 0), torch.bfloat16, 64, "the package flash_attn is not installed"),
        ("flash-attn-3", (8, 0), torch.bfloat16, 64, "compute capabilities from (9, 0) to below (10, 0)"),
        ("flash-attn-2", (7, 5), torch.bfloat16, 64, "compute capabilities from (8, 0)"),
        ("flash-attn-2", (9, 0), torch.bfloat16, 12, "head sizes up to 256 that 8 divides, not 12"),
        ("flash-attn-2", (9, 0), torch.float32, 64, "it takes bf16 and fp16, not torch.float32"),
        ("cudnn", (9, 0), torch.bfloat16, 136, "head sizes up to 128 that 8 divides, not 136"),
        ("cudnn", (7, 5), torch.bfloat16, 64, "it needs compute capability 8.0"),
        ("cudnn", (9, 0), torch.float32, 64, "it takes bf16 and fp16, not torch.float32"),
        ("aten-flash", (9, 0), torch.float64, 64, "it takes bf16 and fp16, not torch.float64"),
        ("aten-flash", (9, 0), torch.bfloat16, 257, "head sizes up to 256 that 8 divides, not 257"),
        ("aten-flash", (7, 5), torch.float16, 64, "it needs compute capability 8.0"),
        ("aten-flash", (12, 0), torch.float16, 200, "it has no backward for heads of 200"),
        ("aten-cpu", (9, 0), torch.float32, 64, "it runs on the CPU, the tensors are on cuda"),
    ],
)
def test_a_kernel_says_why_it_refuses(gpu, name, capability, dtype, head_dim, reason):
    gpu(capability)
    assert reason in str(BY_NAME[name].refuses(CUDA, dtype, head_dim))
    with pytest.raises(PlatformError) as caught:
        select_kernel(name, CUDA, dtype, head_dim)
    assert f"kernel {name}: " in str(caught.value)
    assert reason in str(caught.value)
