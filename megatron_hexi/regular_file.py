"""Regular files: read without waiting for anybody, written whole or not at all, through symbolic links.

Devices, FIFOs, sockets and folders are refused by name: reading one may never end, and replacing one destroys
what others use. What cannot be written is found by `check_output`, before the work whose result it is to
hold.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from megatron_hexi.errors import HexiError

#: Far above any real file (a plan for 4096 ranks takes about 0.4 MB), far below what hurts.
MAX_BYTES = 64 * 2**20

_CHECK = "check the path and its permissions"


def read_bytes(
    path: str | os.PathLike[str],
    max_bytes: int = MAX_BYTES,
    remedy: str = _CHECK,
    other: str = "is it the right file?",
) -> bytes:
    """What a file holds, or what comes through a pipe, as that of ``<(…)``.

    Args:
        path: the file.
        max_bytes: far above any real file of its kind.
        remedy: what to do where it cannot be read.
        other: what to do where it is too large.

    Raises:
        HexiError: it cannot be read, is neither a regular file nor a pipe with a writer, or is too large.
    """
    try:
        status = os.stat(path)  # before opening: to open a device may change its state
        kind = _kind(status.st_mode)
        if kind not in (None, _FIFO):
            raise HexiError(f"{path}: cannot be read (a {kind}, no regular file); {remedy}")
        if status.st_size > max_bytes:
            raise HexiError(
                f"{path}: {status.st_size} bytes, more than the {max_bytes} that are read; {other}"
            )
        # Without waiting: else a FIFO without a writer is opened never.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            begin = b"" if kind is None else _first_bytes(stream)
            if kind is not None and not begin:
                raise HexiError(f"{path}: cannot be read (a {kind} that nobody writes to); give a file")
            content = begin + (stream.read(max_bytes + 1) or b"")
    except OSError as problem:
        raise HexiError(f"{path}: cannot be read ({problem.strerror}); {remedy}") from None
    if len(content) > max_bytes:
        raise HexiError(f"{path}: more than the {max_bytes} bytes that are read; {other}")
    return content


def check_output(path: str | os.PathLike[str]) -> None:
    """Find out whether a file can be written, by making one beside it and removing that again.

    Args:
        path: the file; a symbolic link stands for what it leads to.

    Raises:
        HexiError: it is no regular file, its name is too long, its folder is missing or closed, or its file
            system holds no files of users.
    """
    with _beside(Path(path)):
        pass


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all: a reader never sees half of it.

    A symbolic link stays one: what it leads to is written. A file that is there keeps its mode and, where we
    may give it away, its owner.

    Raises:
        HexiError: as `check_output`, or the disk is full.
    """
    with _beside(Path(path)) as (stream, target, status):
        try:
            if status is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(stream.fileno(), status.st_uid, status.st_gid)
                os.fchmod(stream.fileno(), stat.S_IMODE(status.st_mode))
            rest = memoryview(content)
            while rest:
                rest = rest[stream.write(rest) :]
            stream.close()
            os.replace(stream.name, target)
        except OSError as problem:
            raise HexiError(f"{path}: cannot be written ({problem.strerror}); check the folder") from None


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[tuple[FileIO, Path, os.stat_result | None]]:
    """A new file in the folder of the target, the target, and its status if it is there.

    The new file is gone at the end, unless it was put in the target's place.
    """
    target = Path(os.path.realpath(path)) if os.path.islink(path) else path
    status = _writable_status(path)
    folder = target.parent
    try:
        if not os.path.isdir(folder):
            raise HexiError(f"{path}: the folder {folder} is not there; make it first")
        name = (
            folder / f".hexi-{secrets.token_hex(8)}"
        )  # the target's own name may be as long as names can be
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        raise HexiError(
            f"{path}: the folder {folder} cannot be written to ({problem.strerror}); choose another"
        ) from None
    try:
        with open(name, "wb", buffering=0, opener=lambda *_: handle) as stream:
            yield stream, target, status
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _writable_status(path: Path) -> os.stat_result | None:
    """What is known of a regular file that may be written; ``None``: nothing is there."""
    try:
        status = os.stat(path)
        kind = _kind(status.st_mode)
        if kind == _FOLDER:
            raise HexiError(f"{path}: is a folder; give the name of a file in it")
        if kind is not None:
            raise HexiError(f"{path}: is a {kind}, no regular file; choose another name")
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))  # also asks mounts and attributes
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise HexiError(f"{path}: cannot be written ({problem.strerror}); choose another name") from None
    return status


_FOLDER, _FIFO = "folder", "FIFO"


def _kind(mode: int) -> str | None:
    """What is no regular file, in a word."""
    kinds = {stat.S_IFREG: None, stat.S_IFDIR: _FOLDER, stat.S_IFIFO: _FIFO, stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _first_bytes(pipe: BinaryIO) -> bytes:
    """What comes first, once it comes; nothing where there is no writer (any more)."""
    begin = None
    with contextlib.suppress(BlockingIOError):  # there is a writer, which takes its time
        begin = os.read(pipe.fileno(), 2**16)
    os.set_blocking(pipe.fileno(), True)
    return os.read(pipe.fileno(), 2**16) if begin is None else begin
