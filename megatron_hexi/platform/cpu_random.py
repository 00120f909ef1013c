"""Two streams of random numbers, as on a GPU: the device's and the host's.

On a GPU, weights and dropout draw from the CUDA generator, while the data loader draws from the CPU's.
Megatron relies on the two being apart: it forks the device's stream for tensor-parallel regions, and only
the first tensor-parallel rank has a data loader. On the CPU everything draws from PyTorch's default
generator, so that one is "the device's", and the host gets a generator of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_hexi.patching import Patch
from megatron_hexi.platform.cpu_device import called_from_megatron

#: The stream of the host: what the data loader draws from.
HOST_GENERATOR = torch.Generator()

_DEVICE_GENERATOR = torch.default_generator


class _OneGenerator:
    """``torch.cuda.default_generators``: the same generator for every device index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return _DEVICE_GENERATOR

    def __len__(self) -> int:
        return 1


def _seed_device(seed: int) -> None:
    _DEVICE_GENERATOR.manual_seed(int(seed))


def _get_device_state(device: Any = "cuda") -> torch.Tensor:
    return _DEVICE_GENERATOR.get_state()


def _set_device_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    _DEVICE_GENERATOR.set_state(new_state)


def _get_host_state(original: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    @functools.wraps(original)
    def get_rng_state() -> torch.Tensor:
        return HOST_GENERATOR.get_state() if called_from_megatron() else original()

    return get_rng_state


def _set_host_state(original: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    @functools.wraps(original)
    def set_rng_state(new_state: torch.Tensor) -> None:
        if called_from_megatron():
            HOST_GENERATOR.set_state(new_state)
        else:
            original(new_state)

    return set_rng_state


def _call_now(call: Callable[[], Any], **options: Any) -> None:
    call()


def _patch(target: str, why: str, build: Callable[[Any], Any]) -> Patch:
    return Patch(target, why, build, package="torch", versions=">=2.6")


_DEVICE_STREAM = "the stream of the device is PyTorch's default generator, from which a CPU draws"
_HOST_STREAM = "the stream of the host is apart from that of the device"

RANDOM_PATCHES = (
    _patch("torch.cuda:default_generators", _DEVICE_STREAM, lambda original: _OneGenerator()),
    _patch("torch.cuda:manual_seed", _DEVICE_STREAM, lambda original: _seed_device),
    _patch("torch.cuda:manual_seed_all", _DEVICE_STREAM, lambda original: _seed_device),
    _patch("torch.cuda:get_rng_state", _DEVICE_STREAM, lambda original: _get_device_state),
    _patch("torch.cuda:set_rng_state", _DEVICE_STREAM, lambda original: _set_device_state),
    _patch("torch.cuda.random:get_rng_state", _DEVICE_STREAM, lambda original: _get_device_state),
    _patch("torch.cuda.random:set_rng_state", _DEVICE_STREAM, lambda original: _set_device_state),
    _patch("torch:get_rng_state", _HOST_STREAM, _get_host_state),
    _patch("torch:set_rng_state", _HOST_STREAM, _set_host_state),
    _patch("torch.cuda:_lazy_call", "there is no CUDA to wait for", lambda original: _call_now),
    _patch("torch.cuda:_lazy_init", "there is no CUDA to start", lambda original: lambda: None),
)
