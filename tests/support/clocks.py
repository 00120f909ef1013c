"""The wall clock of one node, which a test can set: a library that its processes preload."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

#: Marks tests that move a node's clock.
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="moving a node's clock needs a C compiler")
_SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """A clock that can be moved while processes look at it.

    Args:
        folder: for the library and the clock's file.
        ahead_s: seconds that it is ahead of this machine's; negative: behind.
    """

    def __init__(self, folder: Path, ahead_s: float = 0.0) -> None:
        folder.mkdir(parents=True)
        library, self._file = folder / "clock.so", folder / "offset"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE], check=True)
        self._file.write_bytes(bytes(8))
        self.set(ahead_s)
        #: Environment of the processes that have this clock.
        self.environment = {"LD_PRELOAD": str(library), "TEST_CLOCK": str(self._file)}

    def set(self, ahead_s: float) -> None:
        """Move the clock to so many seconds ahead of this machine's."""
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), 8) as mapped:
            mapped[:] = struct.pack("q", round(ahead_s * 1e9))
