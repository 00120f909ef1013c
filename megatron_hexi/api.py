"""A door for training loops other than Megatron-LM's: ``from megatron_hexi.api import LoopJob, start``.

Import this module before Megatron: it chooses the device, the GPU where there is one, else the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_hexi.errors import HexiError
from megatron_hexi.patching import PatchSet
from megatron_hexi.platform import select_platform

__all__ = ["LoopJob", "LoopSession", "start"]

if "megatron_hexi.adaptor" in sys.modules:
    raise HexiError(
        "megatron_hexi.api: megatron_hexi.adaptor is imported already, for Megatron-LM's loop; import the "
        "api alone in a loop of your own, or the adaptor alone and give Megatron-LM --hexi-plan"
    )
platform = select_platform("cuda" if torch.cuda.is_available() else "cpu")
platform.install()  # before the next imports, which import Megatron

from megatron_hexi.megatron.loop_job import LoopJob  # noqa: E402
from megatron_hexi.megatron.loop_session import LoopSession, start_loop  # noqa: E402
from megatron_hexi.patch_list import core_patches  # noqa: E402

#: The patches of Megatron-Core; the loop's modules may hold its functions by name.
patches = PatchSet(core_patches(platform), rebound=("",))


def start(plan: str | Path, job: LoopJob) -> LoopSession:
    """Begin to train by a plan: after ``init_process_group``, before the model.

    All ranks call it, in place of Megatron's ``initialize_model_parallel``. They compare their plans, make
    Megatron's groups and the plan's, and install the patches of Megatron-Core.

    Raises:
        HexiError: the plan is wrong, was made for another job, differs between ranks or needs Megatron-LM's
            loop; raised on every rank, before anything is allocated.
    """
    return start_loop(plan, job, platform.device, patches)
