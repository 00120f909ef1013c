"""Parse the choice of attention kernels: one name, or one per kind of GPU (``H100=cudnn,A100=flash-attn-2``).

A kind of GPU is the beginning of a GPU's name in the cluster file; if several kinds match, the longest
counts. In training a GPU has the name that torch reports (``NVIDIA H100 80GB HBM3``), which contains the
first part of the kind as words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from megatron_hexi.errors import HexiError

#: Kernels that are timed by the curves of another kernel, with that kernel's name: torch ships
#: FlashAttention-2's CUDA code as `aten::_flash_attention`.
KERNEL_ALIASES = {"aten-flash": "flash-attn-2"}
#: Widest head that each fused kernel can compute; in latent attention the wider of key and value.
WIDEST_HEADS = {"cudnn": 128, "flash-attn-2": 256, "aten-flash": 256, "flash-attn-3": 256}


def split_kernels(text: str) -> dict[str, str]:
    """Return the kernel chosen for each kind of GPU; the kind "" stands for every GPU."""
    if "=" not in text and "," not in text and text:
        return {"": text}
    kernels: dict[str, str] = {}
    for part in text.split(","):
        gpu, _, kernel = part.partition("=")
        if not gpu or not kernel or "=" in kernel:
            raise HexiError(
                f"kernel {text}: {part!r} is not GPU=NAME; write one name, or as H100=cudnn,A100=flash-attn-2"
            )
        if gpu in kernels:
            raise HexiError(f"kernel {text}: names {gpu} twice; name each GPU once")
        kernels[gpu] = kernel
    return kernels


def join_kernels(kernels: Mapping[str, str]) -> str:
    """Return kernels by kind of GPU as the text that `split_kernels` parses."""
    return ",".join(f"{gpu}={kernel}" for gpu, kernel in kernels.items())


def kernel_on(text: str | None, device: str) -> str | None:
    """Return the kernel that `text` chooses for a GPU of the cluster file; ``None``: the default kernel."""
    chosen = {} if text is None else split_kernels(text)
    kinds = [gpu for gpu in chosen if device.startswith(gpu)]
    return chosen[max(kinds, key=len)] if kinds else None


def kernel_by_torch(kernels: Mapping[str, str], gpu: str) -> str | None:
    """Return the kernel chosen for a GPU by its name in torch.

    ``None`` if no kind of GPU matches the name, or if several match that have different kernels.

    Args:
        kernels: kernels by kind, as `split_kernels` returns them.
        gpu: the name that `torch.cuda.get_device_name` returns; empty on a CPU.
    """
    if not gpu:
        return kernels.get("")
    words = re.split(r"[^A-Za-z0-9]+", gpu)
    # RTX 4090 is the kind RTX4090, RTX 3080 Ti is RTX3080Ti.
    runs = {"".join(words[a:b]).lower() for a, b in itertools.combinations(range(len(words) + 1), 2)}
    named = {kernel for kind, kernel in kernels.items() if not kind or kind.split("-")[0].lower() in runs}
    return named.pop() if len(named) == 1 else None


def is_same_kernel(first: str, second: str) -> bool:
    """Whether two kernel names stand for the same kernel code."""
    return KERNEL_ALIASES.get(first, first) == KERNEL_ALIASES.get(second, second)
