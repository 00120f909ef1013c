"""Tells Megatron's and the training script's calls from PyTorch's, where their answers must differ."""

from __future__ import annotations

import sys

from megatron_hexi.patching import MEGATRON_MODULES


def called_from_megatron() -> bool:
    """Return whether the caller was itself called from Megatron or the training script.

    PyTorch itself calls the functions that stand in for CUDA here (its optimizers call
    `torch.cuda.is_available()`), and must get true answers.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return str(caller).startswith(MEGATRON_MODULES)
