"""Folders that a training saves in and loads from, looked at before anything is allocated.

Megatron finds out late: a file in place of ``--save`` at the first checkpoint, a missing iteration once the
model is there, and both with a traceback on every rank.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from pathlib import Path

from megatron_hexi.errors import CheckpointError, HexiError

#: Folders that Megatron makes where they are missing, by the names of their arguments.
_WRITTEN = ("save", "tensorboard_dir", "data_cache_path", "wandb_save_dir")
_ITERATION = re.compile(r"iter_(\d{7})")


def check_folders(args: Namespace) -> None:
    """Refuse folders that cannot be written in, or that hold no checkpoint to load.

    Args:
        args: Megatron's arguments, not yet checked.

    Raises:
        HexiError: what a folder is made of is a file, or is closed to this user.
        CheckpointError: ``--load`` holds no checkpoint, or not the iteration that is asked for.
    """
    for name in _WRITTEN:
        path = getattr(args, name, None)
        if path and "://" not in path:
            _check_written(f"--{name.replace('_', '-')} {path}", Path(path))
    if args.load and "://" not in args.load and args.hexi_plan is not None:
        _check_loaded(args)


def saved_iterations(folder: Path) -> list[int]:
    """The iterations that a folder of checkpoints holds, ascending."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := _ITERATION.fullmatch(name)))


def tracked_iteration(folder: str) -> int | str:
    """The iteration that Megatron would load, or ``release``; another text of the tracker file as it is."""
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    text = Path(get_checkpoint_tracker_filename(folder)).read_bytes()[:80].decode(errors="replace").strip()
    return int(text) if text.isascii() and text.isdecimal() else text


def others_hint(folder: Path, without: int) -> str:
    """Which other iterations a folder holds, and how to load one: the remedy of errors."""
    others = [iteration for iteration in saved_iterations(folder) if iteration != without]
    if not others:
        return "it holds no other; leave --load out to begin anew"
    listed = ", ".join(map(str, others[-8:]))
    return f"it holds {listed} too: add --ckpt-step {others[-1]} to go on from there"


def _check_written(what: str, path: Path) -> None:
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not os.path.isdir(there):
        raise HexiError(
            f"{what}: {'' if there == path else f'{there} '}is a file, not a folder; give another"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise HexiError(f"{what}: nothing can be written in {there}; give another folder, or change its mode")


def _check_loaded(args: Namespace) -> None:
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    folder, what = Path(args.load), f"--load {args.load}"
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise CheckpointError(f"{what}: is a file; give the folder that --save wrote")
    if args.non_persistent_ckpt_type is not None:
        return  # the newest checkpoint may lie elsewhere
    tracker = Path(get_checkpoint_tracker_filename(args.load))
    if args.ckpt_step is not None:
        iteration, said = args.ckpt_step, f"--ckpt-step {args.ckpt_step}"
    elif os.path.isfile(tracker):
        iteration = tracked_iteration(args.load)
        said = f"{tracker.name} says {iteration}"
    elif args.pretrained_checkpoint is not None or _is_first_start(args):
        return
    else:
        raise CheckpointError(
            f"{what}: holds no checkpoint (no file {tracker.name}); give the folder that --save wrote, or "
            "leave --load out to begin anew"
        )
    name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
    if name != "release" and isinstance(iteration, str):
        raise CheckpointError(f"{what}: {said}, which is no iteration; {others_hint(folder, -1)}")
    if not os.path.isdir(folder / name):
        missing = -1 if isinstance(iteration, str) else iteration
        raise CheckpointError(
            f"{what}: {said}, and there is no folder {name}; {others_hint(folder, missing)}"
        )


def _is_first_start(args: Namespace) -> bool:
    """Whether the training is to save where it loads from, as one that can be started again does."""
    return args.save is not None and Path(args.save).absolute() == Path(args.load).absolute()
