"""FlashAttention 2 and 3 from their own packages, if installed.

Releases of these packages add and rename parameters of the functions used here. Each call therefore names its
arguments. A release that lacks one of these names is refused; further required parameters get neutral values.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.errors import PlatformError
from megatron_hexi.runtime.kernels.base import (
    KernelOnOffer,
    Mode,
    Sequences,
    by_heads,
    by_rows,
    is_deterministic,
)

#: Parameter values that switch off all features besides plain attention, passed if a release has no default.
_LEFT_OUT = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "return_softmax": False,
    "deterministic": False,
}


class FlashAttentionKernel(KernelOnOffer):
    """`flash_attn` (2) or `flash_attn_interface` (3): bf16 and fp16, GQA natively.

    The functions take [B, tokens, heads, D], which is the layout of our all-to-all for a batch of one
    sequence.

    Args:
        capability: CUDA compute capabilities for which the kernel is built: the least, and the first above.
        deterministic: whether all releases with the argument `deterministic` obey it.
        one_function: whether the functions for one sequence also take several sequences.
    """

    def __init__(
        self,
        name: str,
        module: str,
        capability: tuple[tuple[int, int], tuple[int, int]],
        deterministic: bool = True,
        one_function: bool = False,
    ) -> None:
        self.name = name
        self._module = module
        self._capability = capability
        self._deterministic = deterministic
        self._one_function = one_function

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {device.type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bf16 and fp16, not {dtype}"
        if head_dim % 8 or head_dim > 256:
            return f"it takes head sizes up to 256 that 8 divides, not {head_dim}"
        least, most = self._capability
        if not least <= torch.cuda.get_device_capability(device) < most:
            return f"it is made for compute capabilities from {least} to below {most}"
        if not _is_installed(self._module):
            return f"the package {self._module.partition('.')[0]} is not installed"
        if is_deterministic() and not self._deterministic:
            return "not every release has a deterministic backward, and they cannot be told apart"
        if is_deterministic() and "deterministic" not in _function(self._module, "_flash_attn_backward")[1]:
            return "the installed release has no deterministic backward"
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        q, k, v = (by_rows(tensor, mode) for tensor in (query, key, value))
        output, lse, *_ = self._call("forward", mode, q=q, k=k, v=v)
        if mode.sequences is None:
            return by_heads(output, mode), lse
        if lse.shape != (query.shape[1], query.shape[2]):  # flash-attn before 2.6
            raise PlatformError(
                f"{self.name}: this release pads documents' log-sum-exp; install flash-attn 2.6 or later"
            )
        return by_heads(output, mode), lse[None]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (by_rows(tensor, mode) for tensor in (grad, query, key, value, output))
        dq, dk, dv = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v))
        lse = lse if mode.sequences is None else lse[0]
        asked = {"deterministic": True} if is_deterministic() else {}
        self._call(
            "backward", mode, dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, **asked
        )
        return by_heads(dq, mode), by_heads(dk, mode), by_heads(dv, mode)

    def _call(self, way: str, mode: Mode, **arguments: Any) -> Any:
        """Call the package's forward or backward function, for one or several sequences."""
        is_one = mode.sequences is None or self._one_function
        function = _named(self._module, ("_flash_attn_" if is_one else "_flash_attn_varlen_") + way)
        return function(**arguments, softmax_scale=mode.scale, causal=mode.causal, **_lengths(mode.sequences))


def flash_attention_2() -> FlashAttentionKernel:
    """Return FlashAttention-2, for Ampere and newer."""
    return FlashAttentionKernel("flash-attn-2", "flash_attn.flash_attn_interface", ((8, 0), (99, 0)))


def flash_attention_3() -> FlashAttentionKernel:
    """Return FlashAttention-3, for Hopper only.

    Releases of 2025 accepted `deterministic` but ignored it
    (https://github.com/Dao-AILab/flash-attention/pull/1766); they cannot be told by their versions.
    """
    return FlashAttentionKernel(
        "flash-attn-3", "flash_attn_interface", ((9, 0), (10, 0)), deterministic=False, one_function=True
    )


def _is_installed(module: str) -> bool:
    """Whether a module is installed; the module is not imported.

    FlashAttention-4 is installed in the folder of FlashAttention-2's package, which may then have no code.
    """
    package, _, name = module.partition(".")
    spec = find_spec(package)
    if spec is None or not name:
        return spec is not None
    return PathFinder.find_spec(name, list(spec.submodule_search_locations or ())) is not None


def _lengths(sequences: Sequences | None) -> dict[str, Any]:
    """Return the ends and largest lengths of sequences by the packages' parameter names."""
    if sequences is None:
        return {}
    return {
        "cu_seqlens_q": sequences.query_ends,
        "cu_seqlens_k": sequences.key_ends,
        "max_seqlen_q": max(sequences.queries),
        "max_seqlen_k": max(sequences.keys),
    }


@cache
def _named(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module, to be called with parameter names that all releases have in common."""
    function, parameters = _function(module, name)
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    unasked = {key: _LEFT_OUT.get(key) for key in required}
    # FlashAttention-3's backward has had both names.
    causal = "is_causal" if "is_causal" in parameters else "causal"

    def call(**arguments: Any) -> Any:
        arguments[causal] = arguments.pop("causal")
        unknown = arguments.keys() - parameters.keys()
        if unknown:
            raise PlatformError(
                f"{module}.{name} has no parameter {', '.join(sorted(unknown))}; install another release, "
                "or choose another kernel with --hexi-kernel"
            )
        return function(**{**unasked, **arguments})

    return call


def _function(module: str, name: str) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
    """Return a function of a module, and the function's parameters by name."""
    function = getattr(importlib.import_module(module), name)
    # torch's wrapper around the functions of some releases keeps the signature here.
    return function, inspect.signature(getattr(function, "_init_fn", function)).parameters
