"""The folder of a run: nobody else's while it runs, emptied by the next run, and never a stranger's."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron_hexi.errors import HexiError

#: Tells our folders from others; locked as long as a run goes on.
_MARK = ".hexi-demo"


@contextmanager
def run_folder(path: Path) -> Iterator[Path]:
    """An empty folder, ours until the context is left.

    Args:
        path: not there yet, an empty folder, or one of an earlier run, whose files are deleted.

    Returns:
        Its absolute path.

    Raises:
        HexiError: it is somebody else's, is in use, or cannot be made.
    """
    path = path.resolve()
    try:
        mark = _claim(path)
    except OSError as problem:
        raise HexiError(f"{path}: cannot be used ({problem.strerror}); give --out another folder") from None
    with mark:
        yield path


def _claim(path: Path) -> IO[str]:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()) and not (path / _MARK).is_file():
        raise HexiError(f"{path}: holds files that are not the demo's; give --out another folder")
    mark = (path / _MARK).open("a")
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HexiError(f"{path}: another demo is at work there; give --out another folder") from None
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _MARK:
            entry.unlink()
    return mark
