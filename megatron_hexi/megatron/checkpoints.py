"""Checkpoints without our arguments except the plan's name, so that Megatron alone can continue.

Weights and optimizer state do not depend on how a sequence was cut. Megatron saves its arguments with them,
which would include ours.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_hexi.errors import CheckpointError, user_errors
from megatron_hexi.megatron.session import given_plan
from megatron_hexi.megatron.stages.stage_checkpoints import with_own_boxes
from megatron_hexi.patching import patched
from megatron_hexi.text_file import writing_problem


@patched(
    "megatron.training.checkpointing:generate_state_dict",
    why="saves which plan it was in place of our arguments",
    parameters=(
        *("args", "model", "optimizer", "opt_param_scheduler", "rng_state", "iteration"),
        *("optim_sd_kwargs", "model_sd_kwargs", "rerun_state"),
    ),
)
def _with_provenance(original: Callable[..., Any], args: Namespace, *rest: Any, **kwargs: Any) -> Any:
    return with_own_boxes(original(without_ours(args), *rest, **kwargs))


def without_ours(args: Namespace) -> Namespace:
    """Return a copy of Megatron's arguments without ours; ``hexi_plan`` names the plan, if there was one."""
    saved = copy.copy(args)
    vars(saved).update(getattr(args, "hexi_saved_as", {}))
    for name in [name for name in vars(saved) if name.startswith("hexi_")]:
        delattr(saved, name)
    given = given_plan()
    if given is not None:
        saved.hexi_plan = f"{given.path} {given.digest}"
    return saved


@patched("megatron.training.checkpointing:save_checkpoint", why="a full disk is one line with the folder")
def _named(original: Callable[..., Any], iteration: int, *rest: Any, **kwargs: Any) -> Any:
    """Name the folder and the reason where a checkpoint cannot be written, which Megatron's workers lose."""
    from megatron.training import get_args
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return original(iteration, *rest, **kwargs)
    except (Exception, CheckpointException) as problem:  # torch's is a BaseException
        folder = get_args().save
        reason = writing_problem(Path(folder))
        if reason is None:
            raise
        with user_errors():
            raise CheckpointError(
                f"--save {folder}: the checkpoint of iteration {iteration} cannot be written ({reason}); "
                "make room there, and start again: training goes on from the last whole checkpoint"
            ) from problem


CHECKPOINT_PATCHES = (_with_provenance, _named)
