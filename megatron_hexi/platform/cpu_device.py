"""The device named "cuda", wherever a tensor is made or moved, means the CPU.

Megatron's optimizer tells master weights apart by their type's name, "torch.cuda.FloatTensor". PyTorch itself
needs the true answer, so a call from Megatron is told from one of PyTorch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megatron_hexi.patching import MEGATRON_MODULES, Patch


def called_from_megatron() -> bool:
    """Return whether the caller was itself called from Megatron or the training script.

    PyTorch itself calls the functions that stand in for CUDA here (its optimizers call
    `torch.cuda.is_available()`), and must get true answers.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return str(caller).startswith(MEGATRON_MODULES)


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(tensor, *args, **kwargs)
        if isinstance(answer, str) and called_from_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


TENSOR_TYPE_PATCHES = (
    Patch(
        target="torch:Tensor.type",
        why="Megatron's optimizer and gradient clipping accept torch.cuda.*Tensor only",
        build=_type,
        package="torch",
        versions=">=2.6",
    ),
)


_CPU = torch.device("cpu")

_FACTORIES = (
    *(
        "arange",
        "as_tensor",
        "empty",
        "empty_like",
        "eye",
        "full",
        "full_like",
        "linspace",
        "ones",
        "ones_like",
    ),
    *("rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)
_NEW_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

# PyTorch looks its factories up once for `with torch.device(...)`: let it find the originals.
_device_constructors()


def _on_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device (``"cuda"``, ``"cuda:1"``, an index), and any other `device` as is."""
    is_cuda = (
        isinstance(device, int)
        or (isinstance(device, str) and device.startswith("cuda"))
        or (isinstance(device, torch.device) and device.type == "cuda")
    )
    return _CPU if is_cuda else device


def _factory(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)  # pages are pinned for the sake of a GPU
        return original(*args, **kwargs)

    return make


def _to(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (_on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original(tensor, *args, **kwargs)

    return to


def _itself(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def itself(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    return itself


def _patch(target: str, why: str, build: Callable[[Any], Any]) -> Patch:
    return Patch(target, why, build, package="torch", versions=">=2.6")


#: `torch.nn.Module.cuda` and `.to` go through the methods of the tensors and need no patch.
DEVICE_PATCHES = (
    *(_patch(f"torch:{name}", 'device="cuda" makes a CPU tensor', _factory) for name in _FACTORIES),
    *(_patch(f"torch:Tensor.{name}", 'device="cuda" makes a CPU tensor', _factory) for name in _NEW_METHODS),
    _patch("torch:Tensor.to", "a tensor moved to CUDA stays on the CPU", _to),
    _patch("torch:Tensor.cuda", "a tensor moved to CUDA stays on the CPU", _itself),
    _patch("torch:Tensor.pin_memory", "pages are pinned for the sake of a GPU", _itself),
    _patch("torch:Tensor.record_stream", "there are no streams to record", _itself),
)
