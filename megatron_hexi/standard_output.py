"""The standard streams of a command: what cannot be printed is one line of error, not a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from megatron_hexi.errors import HexiError


class _StandardStream(io.FileIO):
    """A standard stream; after a write that fails it takes everything, so that Python can end."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as problem:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.fileno() == 1:
                raise HexiError(
                    f"standard output cannot be written ({problem.strerror}); check the disk, or the "
                    "program, that it goes to"
                ) from None
            return len(data)  # nobody can be told


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """Turn a closed or full standard output, inside this context, into an error of the user's.

    What is lost of standard error is lost silently. Names of files, which need not be text, are escaped.
    """
    if sys.stderr is None:  # else `print` takes the standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if sys.stdout is None:
        raise HexiError("standard output is closed; leave >&- out, or write > /dev/null")
    for number, name in ((1, "stdout"), (2, "stderr")):
        if guarded := _guarded(getattr(sys, name), number):
            _replaced.append(getattr(sys, name))
            setattr(sys, name, guarded)
    try:
        yield
    except BaseException:  # says more than that it cannot be printed
        with contextlib.suppress(HexiError):
            sys.stdout.flush()
        raise
    sys.stdout.flush()


#: Streams that were replaced; one that nobody holds may close the file that it has in common with the other.
_replaced: list[TextIO] = []


def _guarded(stream: TextIO, number: int) -> TextIO | None:
    """Return a stream in the place of a standard one; ``None`` where that is none of the process's own."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if not isinstance(raw, io.FileIO) or raw.fileno() != number:
        return None
    return io.TextIOWrapper(
        io.BufferedWriter(_StandardStream(number, "w", closefd=False)),
        stream.encoding,
        "backslashreplace",
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )
