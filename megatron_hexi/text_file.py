"""Text files: read with clear errors; a file, or a line at the end of one, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from megatron_hexi.errors import HexiError


def read_text(
    path: Path,
    max_bytes: int | None = None,
    remedy: str = "check the path and its permissions",
    other: str = "is it the right file?",
) -> str:
    """What a file holds.

    Args:
        path: the file.
        max_bytes: far above any real file; ``None``: it may have any size.
        remedy: what to do where it cannot be read.
        other: what to do where it is something else than text, or too large.

    Raises:
        HexiError: the file cannot be read, is too large, or is no text.
    """
    try:
        size = path.stat().st_size
        if max_bytes is not None and size > max_bytes:
            raise HexiError(f"{path}: {size} bytes, more than the {max_bytes} that are read; {other}")
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise HexiError(f"{path}: cannot be read ({problem.strerror}); {remedy}") from None
    except UnicodeDecodeError:
        raise HexiError(f"{path}: not text (no UTF-8); {other}") from None


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all: a reader never sees half of it.

    Raises:
        HexiError: the folder is missing or cannot be written to.
    """
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as problem:
        raise HexiError(f"{path}: cannot be written ({problem.strerror}); check the folder") from None


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, whole or not at all.

    Args:
        path: the file; its folder must be there.
        line: what to append, without its end.

    Raises:
        HexiError: it cannot be written.
    """
    try:
        with path.open("ab", buffering=0) as file:
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
