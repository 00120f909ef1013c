"""Text files: reading with clear errors, atomic writes, appended lines."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from megatron_hexi.errors import HexiError
from megatron_hexi.regular_file import MAX_BYTES, open_private, read_bytes, write_atomically


def read_text(
    path: str | os.PathLike[str],
    max_bytes: int = MAX_BYTES,
    remedy: str = "check the path and its permissions",
    content_remedy: str = "is it the right file?",
) -> str:
    """Return the contents of a file in UTF-8, without a byte order mark.

    Raises:
        HexiError: the file cannot be read, is too large, or is no text.
    """
    content = read_bytes(path, max_bytes, remedy, content_remedy)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise HexiError(f"{path}: not text (no UTF-8); {content_remedy}") from None


def write_text_atomically(path: str | os.PathLike[str], text: str, private: bool = False) -> None:
    """Write a file atomically: a reader never sees a part of it.

    Args:
        private: whether a new file may be read and written by its owner only.

    Raises:
        HexiError: it is no regular file, or cannot be written.
    """
    write_atomically(path, text.encode("utf-8", "backslashreplace"), private)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, whole or not at all; a new file is its owner's only.

    Args:
        path: the file; its folder must exist.

    Raises:
        HexiError: it cannot be written.
    """
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
