"""Text files: read with clear errors; a file, or a line at the end of one, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from megatron_hexi.errors import HexiError
from megatron_hexi.regular_file import MAX_BYTES, read_bytes, write_atomically


def read_text(
    path: str | os.PathLike[str],
    max_bytes: int = MAX_BYTES,
    remedy: str = "check the path and its permissions",
    other: str = "is it the right file?",
) -> str:
    """What a file in UTF-8 holds, without the mark that some editors begin it with.

    Args:
        path: the file.
        max_bytes: far above any real file of its kind.
        remedy: what to do where it cannot be read.
        other: what to do where it is something else than text, or too large.

    Raises:
        HexiError: the file cannot be read, is too large, or is no text.
    """
    content = read_bytes(path, max_bytes, remedy, other)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise HexiError(f"{path}: not text (no UTF-8); {other}") from None


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all: a reader never sees half of it.

    Raises:
        HexiError: it is no regular file, or cannot be written.
    """
    write_atomically(path, text.encode("utf-8", "backslashreplace"))


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
