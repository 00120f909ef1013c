"""Files: non-blocking reads with clear errors, atomic writes (also through symbolic links), appended lines.

Devices, FIFOs, sockets and folders are refused by name: reading one may never end, and replacing one destroys
what others use. `check_output` finds out whether a file can be written, before its contents are computed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from megatron_hexi.errors import HexiError

#: Far above any real file (a plan for 4096 ranks takes about 0.4 MB), far below what hurts.
MAX_BYTES = 64 * 2**20

#: What `writing_problem` writes, and at a time.
_TRIED_BYTES, _BLOCK = 2**20, 2**12

_CHECK = "check the path and its permissions"


def read_bytes(
    path: str | os.PathLike[str],
    max_bytes: int = MAX_BYTES,
    remedy: str = _CHECK,
    size_remedy: str = "is it the right file?",
) -> bytes:
    """Return the contents of a file, or of a pipe such as that of ``<(…)``."""
    try:
        status = os.stat(path)  # before opening: to open a device may change its state
        kind = _kind(status.st_mode)
        if kind not in (None, _FIFO):
            raise HexiError(f"{path}: cannot be read (a {kind}, no regular file); {remedy}")
        if status.st_size > max_bytes:
            raise HexiError(
                f"{path}: {status.st_size} bytes, more than the {max_bytes} that are read; {size_remedy}"
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
        raise HexiError(f"{path}: more than the {max_bytes} bytes that are read; {size_remedy}")
    return content


def check_output(path: str | os.PathLike[str]) -> None:
    """Check that a file can be written, by creating and removing another in its folder.

    Args:
        path: the file; of a symbolic link, its target.

    Raises:
        HexiError: it is no regular file, its name is too long, its folder is missing or closed, or its file
            system holds no files of users.
    """
    with _beside(Path(path)):
        pass


def writing_problem(folder: Path) -> str | None:
    """Return why a folder, or the nearest existing one above, takes no file of 1 MiB; ``None`` if one fits.

    Libraries that write large files may lose the system's reason, such as a full disk.
    """
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
            for _ in range(_TRIED_BYTES // _BLOCK):
                stream.write(bytes(_BLOCK))
    except OSError as problem:
        return problem.strerror
    return None


def open_private(path: str, flags: int) -> int:
    """Open a file (an `opener` for `open`); only its owner may read and write a file that this creates."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def write_atomically(path: str | os.PathLike[str], content: bytes, private: bool = False) -> None:
    """Write a file atomically: a reader never sees a part of it.

    A symbolic link stays one: its target is written. An existing file keeps its mode and, where permitted,
    its owner.
    """
    with _beside(Path(path)) as (stream, target, status):
        try:
            if status is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(stream.fileno(), status.st_uid, status.st_gid)
                os.fchmod(stream.fileno(), stat.S_IMODE(status.st_mode))
            elif private:
                os.fchmod(stream.fileno(), 0o600)
            remaining = memoryview(content)
            while remaining:
                remaining = remaining[stream.write(remaining) :]
            stream.close()
            os.replace(stream.name, target)
        except OSError as problem:
            raise HexiError(f"{path}: cannot be written ({problem.strerror}); check the folder") from None


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[tuple[FileIO, Path, os.stat_result | None]]:
    """Yield a new file in the target's folder, the target, and the status of an existing target.

    The new file is removed at the end, unless it has replaced the target.
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
    """Return the status of a writable regular file; ``None`` where it does not exist."""
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
    """Return the kind of a file that is not regular; ``None`` for a regular file."""
    kinds = {stat.S_IFREG: None, stat.S_IFDIR: _FOLDER, stat.S_IFIFO: _FIFO, stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _first_bytes(pipe: BinaryIO) -> bytes:
    """Return the first bytes of a pipe, waiting for them; empty without a writer."""
    begin = None
    with contextlib.suppress(BlockingIOError):  # there is a writer, which takes its time
        begin = os.read(pipe.fileno(), 2**16)
    os.set_blocking(pipe.fileno(), True)
    return os.read(pipe.fileno(), 2**16) if begin is None else begin


def read_text(
    path: str | os.PathLike[str],
    max_bytes: int = MAX_BYTES,
    remedy: str = "check the path and its permissions",
    content_remedy: str = "is it the right file?",
) -> str:
    """Return the contents of a file in UTF-8, without a byte order mark."""
    content = read_bytes(path, max_bytes, remedy, content_remedy)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise HexiError(f"{path}: not text (no UTF-8); {content_remedy}") from None


def write_text_atomically(path: str | os.PathLike[str], text: str, private: bool = False) -> None:
    """Write a file atomically: a reader never sees a part of it.

    Args:
        private: whether a new file may be read and written by its owner only.
    """
    write_atomically(path, text.encode("utf-8", "backslashreplace"), private)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, whole or not at all; a new file is its owner's only."""
    try:
        with open(path, "ab", buffering=0, opener=open_private) as file:
            end, data = file.seek(0, os.SEEK_END), f"{line}\n".encode()
            try:
                written = file.write(data)
                if written != len(data):
                    raise OSError(None, "no space for a whole line")
            except OSError:
                with contextlib.suppress(OSError):  # a device has no end to cut off
                    file.truncate(end)
                raise
    except OSError as problem:
        raise HexiError(
            f"{path}: cannot be written ({problem.strerror}); check the disk and its folder"
        ) from None
