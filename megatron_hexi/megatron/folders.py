"""Checks of the folders that a training run saves in and loads from, before anything is allocated.

Megatron fails late: a file in place of ``--save`` at the first checkpoint, a missing iteration once the model
is built, and both with a traceback on every rank.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from pathlib import Path

from megatron_hexi.errors import CheckpointError, HexiError
from megatron_hexi.megatron.checkpoint_files import lacks

#: Folders that Megatron makes where they are missing, by the names of their arguments.
_WRITTEN = ("save", "tensorboard_dir", "data_cache_path", "wandb_save_dir")
#: Folders that weights are loaded from, in the order in which Megatron looks for them.
_READ = ("load", "pretrained_checkpoint")
#: Megatron's name of the file with the last iteration.
_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7})")


def check_folders(args: Namespace) -> None:
    """Refuse folders that cannot be written in, or that hold no checkpoint to load.

    Raises:
        HexiError: a part of a folder's path is a file, or is closed to this user; with a plan, ``--save`` has
            no interval, or one that Megatron cannot keep.
        CheckpointError: ``--load`` holds no checkpoint, not the wanted iteration, or a damaged one.
    """
    for name in _WRITTEN:
        path = getattr(args, name, None)
        if path and "://" not in path:
            _check_written(f"--{name.replace('_', '-')} {path}", Path(path))
    if args.hexi_plan is not None:
        _check_loaded(args)
        _check_interval(args)


def loaded_folder(args: Namespace) -> tuple[str, str] | None:
    """Return the option and the folder that a job loads its weights from; ``None`` if nothing is loaded."""
    folders = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in _READ if getattr(args, name)]
    last = folders[-1] if folders else None
    return next((pair for pair in folders if tracked_iteration(pair[1]) is not None), last)


def saved_iterations(folder: Path) -> list[int]:
    """Return the iterations that a folder of checkpoints holds, ascending."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := _ITERATION.fullmatch(name)))


def tracked_iteration(folder: str) -> int | str | None:
    """Return the iteration that Megatron would load, ``release``, or an unknown text of the tracker file.

    ``None``: there is no such file, and so no checkpoint.
    """
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    path = get_checkpoint_tracker_filename(folder)
    if not os.path.isfile(path):
        return None
    text = Path(path).read_bytes()[:80].decode(errors="replace").strip()
    return int(text) if text.isascii() and text.isdecimal() else text


def iteration_folder(folder: Path, iteration: int | str | None) -> Path:
    """Return the folder of an iteration as `tracked_iteration` returns it."""
    return folder / (f"iter_{iteration:07d}" if isinstance(iteration, int) else str(iteration))


def iterations_hint(folder: Path, without: int | str | None = None) -> str:
    """Return a remedy for an error's message: the other iterations in a folder, and how to load one."""
    iterations = [iteration for iteration in saved_iterations(folder) if iteration != without]
    if not iterations:
        return "it holds no other; leave --load out to start from the beginning"
    listed = ", ".join(map(str, iterations[-8:]))
    return f"it holds {listed} too: add --ckpt-step {iterations[-1]} to go on from there"


def _check_written(option: str, path: Path) -> None:
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not os.path.isdir(there):
        raise HexiError(
            f"{option}: {'' if there == path else f'{there} '}is a file, not a folder; give another"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise HexiError(
            f"{option}: nothing can be written in {there}; give another folder, or change its mode"
        )


def _check_interval(args: Namespace) -> None:
    """Refuse --save without an interval, which our commands add and Megatron refuses without a message."""
    if args.save is not None and args.save_interval is None:
        raise HexiError(
            f"--save {args.save}: nothing says how often it is written; add --save-interval ITERATIONS, or "
            "leave --save out"
        )


def _check_loaded(args: Namespace) -> None:
    source = loaded_folder(args)
    if source is None or any("://" in (getattr(args, name) or "") for name in _READ):
        return
    option, folder = " ".join(source), Path(source[1])
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise CheckpointError(f"{option}: is a file; give the folder that --save wrote")
    if args.non_persistent_ckpt_type is not None:
        return  # the newest checkpoint may lie elsewhere
    iteration, subject = tracked_iteration(source[1]), f"{_TRACKER} says"
    if args.ckpt_step is not None:
        iteration, subject = args.ckpt_step, "--ckpt-step"
    elif iteration is None and source[0] == "--load" and _is_first_start(args):
        return
    if iteration is None:
        raise CheckpointError(
            f"{option}: holds no checkpoint (no file {_TRACKER}); give the folder that --save wrote, or "
            f"leave {source[0]} out to start from the beginning"
        )
    if isinstance(iteration, str) and iteration != "release":
        raise CheckpointError(
            f"{option}: {subject} {iteration!r}, which is no iteration; {iterations_hint(folder)}"
        )
    path = iteration_folder(folder, iteration)
    if not path.is_dir():
        raise CheckpointError(
            f"{option}: {subject} {iteration}, and there is no folder {path.name}; "
            f"{iterations_hint(folder, iteration)}"
        )
    if damage := lacks(path):
        raise CheckpointError(
            f"{option}: iteration {iteration} cannot be read: {damage}; {iterations_hint(folder, iteration)}"
        )


def _is_first_start(args: Namespace) -> bool:
    """Whether the job saves where it loads from, as a job that can be restarted does."""
    return None not in (args.save, args.load) and Path(args.save).absolute() == Path(args.load).absolute()
