"""The fence: at most one round of a job writes what outlives rounds, and ranks of any other end and say why.

Ranks ask the store whether their round is the present one. A rank that is stopped after that could still
write, and another job with the same ``--save`` has another store. So checkpoints are written in a folder of
the round within ``--save``, and moved to their place when they are complete. A new round moves the folders of
all others away. Renaming is atomic: a checkpoint that was not in its place by then never gets there.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_hexi.elastic import say
from megatron_hexi.elastic.store import (
    ROUND_IS_OVER,
    ROUND_VARIABLE,
    START_AGAIN,
    in_round,
    read_present,
    whole_store,
)
from megatron_hexi.errors import HexiError
from megatron_hexi.patching import patched
from megatron_hexi.runtime import stop_watch

_FOLDER = ".hexi-round-"
#: Key of the job: one of its rounds has taken ``--save``; with a folder's name: one of them has made it.
_MADE = "made"


def end_to_start_again(reason: str) -> NoReturn:
    """Print why this rank ends, and end it; its agent starts it again in the next round."""
    if reason:
        say(reason)
    stop_watch()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(START_AGAIN)


def ask_fence() -> None:
    """End this rank if its round is over, or no store says that it is not; only in an elastic job."""
    if not in_round():
        return
    try:
        is_over = read_present(whole_store()).round != os.environ[ROUND_VARIABLE]
    except RuntimeError as problem:
        reason = str(problem).partition("\n")[0][:200]
        _end(f"the job's store does not answer ({reason}): another round may have begun; nothing is written")
    if is_over:
        _end(ROUND_IS_OVER)


def _end(reason: str) -> NoReturn:
    end_to_start_again(f"rank {os.environ['RANK']}: {reason}")


def round_folder(save: str | Path) -> Path:
    """Return the folder in which this round writes checkpoints until they are complete."""
    return Path(save) / f"{_FOLDER}{os.environ[ROUND_VARIABLE]}"


def take_save(save: str | Path, job: dist.Store) -> None:
    """Let this round alone write into ``--save``; called by rank 0.

    The first round of a job takes the folder from another job, too.

    Raises:
        HexiError: another job has taken the folder, or it cannot be written.
    """
    own = round_folder(save)
    try:
        if job.check([_MADE]) and not any(job.check([f"{_MADE}/{folder.name}"]) for folder in _held(own)):
            raise HexiError(
                f"--save {save}: holds no folder {_FOLDER}… of this job's rounds any more: another job has "
                "begun to write there; end one of the two, or give each a folder of its own"
            )
        job.set(f"{_MADE}/{own.name}", "")
        own.mkdir(parents=True)
        while held := _held(own):
            ask_fence()  # after looking, so that a late rank takes nothing from rounds after its own
            for folder in held:
                try:
                    folder.rename(own / folder.name)
                except OSError as problem:  # another round was faster, and may hold this one's folder
                    if problem.errno not in (errno.ENOENT, errno.EINVAL):
                        raise
            _check_held(own)
        for folder in own.iterdir():
            shutil.rmtree(folder, ignore_errors=True)  # ranks that were stopped may have files open
        job.set(_MADE, "")
    except OSError as problem:
        raise HexiError(
            f"--save {save}: cannot be written ({problem.strerror}); make room there, or give another folder"
        ) from None


def _held(own: Path) -> list[Path]:
    return [folder for folder in own.parent.glob(f"{_FOLDER}*") if folder != own]


def _check_held(own: Path) -> None:
    """End this rank if its round's folder has been taken."""
    if not own.is_dir():
        _end(f"{ROUND_IS_OVER} (another round, or another job, writes to {own.parent})")


@patched(
    "megatron.training.checkpointing:save_checkpoint",
    why="ranks of a round that is over save nothing, under megatron_hexi.elastic",
)
def _save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    ask_fence()
    return original(*args, **kwargs)


@patched(
    "megatron.core.dist_checkpointing.serialization:save",
    why="a checkpoint is written in a folder of the round until complete, under megatron_hexi.elastic",
)
def _write(original: Callable[..., Any], state: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args
    from torch.distributed.checkpoint.api import CheckpointException

    target = Path(checkpoint_dir)
    if not in_round() or hasattr(get_args(), "hexi_saved_as") or target.parent != Path(get_args().save):
        return original(state, checkpoint_dir, *args, **kwargs)
    own = round_folder(target.parent)
    begun, leads = own / target.name, dist.get_rank() == 0
    try:
        if leads:
            begun.mkdir(exist_ok=True)
        result = original(state, str(begun), *args, **kwargs)
        if leads:
            publish(begun, target)
    except (Exception, CheckpointException):  # torch's is a BaseException
        _check_held(own)
        raise
    dist.barrier()
    return result


def publish(begun: Path, target: Path) -> None:
    """Move a complete checkpoint from the folder of its round to its place.

    Raises:
        OSError: the round's folder has been taken.
    """
    replaced = begun.parent / "replaced"
    if any(target.iterdir()):  # what a kill has left in the middle of saving, in a job that was not elastic
        target.rename(replaced)
    begun.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


FENCE_PATCHES = (_save, _write)
