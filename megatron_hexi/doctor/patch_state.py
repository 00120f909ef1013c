"""Whether our patches fit the installed Megatron."""

from __future__ import annotations

import importlib.util

from megatron_hexi.doctor.facts import PatchState
from megatron_hexi.errors import PatchError
from megatron_hexi.patching import Patch


def find_patches() -> tuple[PatchState, ...]:
    """Return the state of every patch of Megatron that a training would apply here; none is applied.

    Empty where Megatron is not installed.

    Raises:
        ImportError: torch or Megatron is installed and cannot be imported.
    """
    if importlib.util.find_spec("megatron") is None:
        return ()
    import torch

    from megatron_hexi.patch_list import all_patches
    from megatron_hexi.platform import select_platform

    platform = select_platform("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(map(patch_state, all_patches(platform)))


def patch_state(patch: Patch) -> PatchState:
    """Return whether a patch can be applied."""
    if not patch.wanted():
        return PatchState(patch.target, patch.why, "not needed")
    try:
        patch.locate()
    except PatchError as problem:
        return PatchState(patch.target, patch.why, "does not fit", str(problem))
    return PatchState(patch.target, patch.why, "fits")
