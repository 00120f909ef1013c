"""The packages flash_attn and flash_attn_interface, played by modules with their functions' signatures."""

import sys
import types

import pytest
import torch

from megatron_hexi.errors import PlatformError
from megatron_hexi.runtime.kernels import MathKernel, Mode
from megatron_hexi.runtime.kernels import flash_attn as flash_attn_adapter
from megatron_hexi.runtime.kernels.base import Sequences
from megatron_hexi.runtime.kernels.flash_attn import FlashAttentionKernel
from tests.support.flash_attention import flash_attention_2_8, flash_attention_3_beta, flash_attention_3_later
from tests.support.kernels import (
    SHAPES,
    assert_close,
    inputs,
    results,
    shapes,
    truth,
)


def flash_attention_without_scale():
    """A release that does not exist: it calls the scale something else."""

    def forward(q, k, v, scale, causal):
        raise AssertionError("must not be called")

    return forward, forward


def installed(monkeypatch, functions):
    """A kernel over a module with these functions."""
    module = types.ModuleType("hexi_test_flash_attn")
    forward, backward, *varlen = functions()
    vars(module).update(_flash_attn_forward=forward, _flash_attn_backward=backward)
    if varlen:
        vars(module).update(_flash_attn_varlen_forward=varlen[0], _flash_attn_varlen_backward=varlen[1])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    flash_attn_adapter._named.cache_clear()
    one_function = not varlen
    return FlashAttentionKernel("fake", module.__name__, ((8, 0), (10, 0)), one_function=one_function)


@shapes
@pytest.mark.parametrize("release", [flash_attention_2_8, flash_attention_3_beta, flash_attention_3_later])
def test_releases_of_flash_attention_are_called_as_they_want_it(monkeypatch, release, shape):
    kernel = installed(monkeypatch, release)
    tensors, mode = inputs(shape, torch.float32), {"causal": shape[-1], "scale": 0.3}
    assert_close(results(kernel, *tensors, **mode), truth(*tensors, **mode), 2e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("release", [flash_attention_2_8, flash_attention_3_beta])
def test_several_sequences_are_given_with_their_ends(monkeypatch, release, causal):
    kernel = installed(monkeypatch, release)
    tensors = [tensor[:1] for tensor in inputs((8, 2, 16, 16, causal), torch.float32)]
    ends = torch.tensor([0, 3, 4, 16], dtype=torch.int32)
    mode = {"causal": causal, "scale": 0.3, "sequences": Sequences((3, 1, 12), (3, 1, 12), ends, ends)}
    assert_close(results(kernel, *tensors, **mode), results(MathKernel(), *tensors, **mode), 2e-5)
    for start, stop in ((0, 3), (3, 4), (4, 16)):
        alone = truth(*(tensor[:, :, start:stop] for tensor in tensors), causal=causal, scale=0.3)
        found = [tensor[:, :, start:stop] for tensor in results(kernel, *tensors, **mode)]
        assert_close(found, alone, 2e-5)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_in_deterministic_mode_the_backward_is_asked_to_be(monkeypatch, deterministic):
    """The function that plays the release asserts what it is given."""
    kernel = installed(monkeypatch, flash_attention_2_8)
    results(kernel, *inputs(SHAPES["GQA"], torch.float32), causal=False, scale=0.3)


def test_in_deterministic_mode_a_release_that_cannot_be_is_refused(monkeypatch, deterministic):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for release, reason in (
        (flash_attention_2_8, None),
        (flash_attention_3_later, "the installed release has no deterministic backward"),
    ):
        kernel = installed(monkeypatch, release)
        monkeypatch.setattr(flash_attn_adapter, "_is_installed", lambda name: True)
        assert kernel.refuses(torch.device("cuda"), torch.bfloat16, 64) == reason


def test_a_release_of_flash_attention_that_lacks_a_parameter_is_refused(monkeypatch):
    kernel = installed(monkeypatch, flash_attention_without_scale)
    with pytest.raises(
        PlatformError, match=r"_flash_attn_forward has no parameter softmax_scale; install another"
    ):
        kernel.forward(*inputs(SHAPES["MHA"], torch.float32)[:3], Mode(causal=True, scale=1.0))


def test_another_package_in_the_folder_of_flash_attention_2_is_not_taken_for_it(monkeypatch, tmp_path):
    """FlashAttention-4 installs `flash_attn/cute` and nothing else there."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    kernel = flash_attn_adapter.flash_attention_2()
    refusal = kernel.refuses(torch.device("cuda"), torch.bfloat16, 64)
    assert refusal == "the package flash_attn is not installed"
    (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text("")
    assert kernel.refuses(torch.device("cuda"), torch.bfloat16, 64) is None
