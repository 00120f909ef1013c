"""Patches of Megatron itself for the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_hexi.patching import Patch, patched
from megatron_hexi.platform.cpu_fused import FUSED_PATCHES, RMSNorm
from megatron_hexi.platform.cpu_random import HOST_GENERATOR


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
