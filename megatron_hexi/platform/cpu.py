"""The CPU platform: an unmodified Megatron trains without a GPU, with gloo.

Megatron has no CPU mode: it names the device ``"cuda"`` at some seventy places. Rather than touching
those, the few PyTorch entry points through which they all go are replaced, each by a `Patch` with its
reason:

- `cpu_device`: the tensor factories and ``.cuda()``/``.to()`` take ``"cuda"`` to mean the CPU;
- `cpu_cuda`: the surface of ``torch.cuda`` (streams, events, memory, properties);
- four places in Megatron itself, in this module;
- `cpu_layers`: packages with kernels of state-space and delta-net layers.

Explicit wrappers were preferred to a `TorchFunctionMode`, which slows down every operation and holds for
one thread only (autograd has its own), and to a device registered as ``PrivateUse1``, which needs
kernels. What is not in these lists fails as it always does on a machine without a GPU.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_hexi.patching import Patch, PatchSet, patched
from megatron_hexi.platform.cpu_cuda import CUDA_PATCHES, HOST_GENERATOR, RANDOM_PATCHES
from megatron_hexi.platform.cpu_device import DEVICE_PATCHES, TENSOR_TYPE_PATCHES
from megatron_hexi.platform.cpu_layers import FUSED_PATCHES, RMSNorm, stand_ins
from megatron_hexi.platform.select import Platform


@patched(
    "megatron.training.initialize:_warmup_jit_function",
    why="nothing is compiled on a CPU, and its draws depend on the sequence length",
    parameters={"<0.19": (), ">=0.19": ("tp_size",)},
)
def _no_warm_up(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Compile nothing."""


@patched(
    "megatron.training.datasets.data_samplers:build_pretraining_data_loader",
    why="the data loader draws its seed from the host's stream, and there is no GPU to pin pages for",
    parameters=("dataset", "consumed_samples"),
)
def _host_data_loader(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    loader = original(*args, **kwargs)
    if loader is not None:
        loader.generator = HOST_GENERATOR
        loader.pin_memory = False
    return loader


def _fused_norm(original: staticmethod[..., Any]) -> staticmethod[..., Any]:
    build = original.__func__

    @functools.wraps(build)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = SimpleNamespace(**{**vars(config), "sequence_parallel": False})
        norm = build(cls, plain, *args, **kwargs)
        if isinstance(norm, torch.nn.RMSNorm):
            norm.__class__ = RMSNorm
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(new)


@patched(
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
    why="experts exchange by sizes in numpy, which Megatron makes only on the way from a GPU",
)
def _as_asked(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


MEGATRON_PATCHES = (
    *FUSED_PATCHES,
    _no_warm_up,
    _host_data_loader,
    Patch(
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        why="PyTorch's norm does under sequence parallelism, once its gradients are summed over the ranks; "
        "its RMSNorm keeps more than fused kernels do",
        build=_fused_norm,
        parameters=(
            *("cls", "config", "hidden_size", "eps"),
            *("persist_layer_norm", "zero_centered_gamma", "normalization"),
        ),
    ),
    _as_asked,
)


def _do_not_compile(model: Any = None, **options: Any) -> Any:
    """Stand in for `torch.compile`, with or without options: return the function uncompiled."""
    return model if model is not None else lambda function: function


COMPILE = Patch(
    target="torch:compile",
    why="Megatron compiles small functions at import; on a CPU that costs minutes and gains nothing",
    build=lambda original: _do_not_compile,
    package="torch",
    versions=">=2.6",
)


#: Seconds that gloo's threads are given at the end of a job; they need a moment of CPU time each.
_PARTING = 0.5


#: Packages whose kernels Megatron prefers where they can be imported, and which have none for a CPU.
_FOR_GPUS = (
    "transformer_engine",
    "transformer_engine_torch",
    "apex",
    "amp_C",
    "fused_weight_gradient_mlp_cuda",
)


def _wait_for_gloo() -> None:
    """Wait until gloo's threads have dropped the tensors of the last collective, before Python exits.

    A thread drops them a moment after the collective is done. Where a job ends within that moment, the
    interpreter is gone and the process aborts ("terminate called without an active exception") after
    all its work: one run in twenty on a busy machine. Megatron keeps its groups to the end, and torch
    has no call that waits for their threads.
    """
    if dist.is_initialized():
        time.sleep(_PARTING)


@dataclass(frozen=True)
class CpuPlatform(Platform):
    """The CPU's `Platform`; also resets functions that were compiled before it was installed.

    Attributes:
        packages: modules by name, in place of packages with kernels for GPUs.
    """

    packages: Mapping[str, ModuleType] = field(default_factory=dict)

    def install(self) -> None:  # noqa: D102 (as the base's)
        super().install()
        for package in _FOR_GPUS:
            sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # importing it fails from now on
        for name, module in self.packages.items():
            sys.modules.setdefault(name, module)
        atexit.register(_wait_for_gloo)
        self._set_stance("force_eager")

    def remove(self) -> None:  # noqa: D102
        self._set_stance("default")
        atexit.unregister(_wait_for_gloo)
        for package in _FOR_GPUS:
            if sys.modules.get(package, ...) is None:
                del sys.modules[package]
        for name, module in self.packages.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        super().remove()

    def _set_stance(self, stance: Literal["default", "force_eager"]) -> None:
        # Functions that were decorated before `COMPILE` was on (Megatron was imported first).
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance(stance)


def cpu_platform() -> Platform:
    """Return the CPU platform, not yet installed."""
    torch_patches = PatchSet((*DEVICE_PATCHES, *CUDA_PATCHES, *RANDOM_PATCHES, *TENSOR_TYPE_PATCHES, COMPILE))
    return CpuPlatform("cpu", torch.device("cpu"), "gloo", torch_patches, MEGATRON_PATCHES, stand_ins())
