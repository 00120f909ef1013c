"""``python -m megatron_hexi.lab.testbed.guard CGROUP < PIPE``: remove a control group when the pipe closes.

The pipe's other end is held by the command that has made the group. It closes however that ends.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

#: Until the kernel has ended the processes inside.
_PATIENCE_S = 20.0


def main(root: Path) -> None:
    """Wait for the end of standard input, then remove the group and those below it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _PATIENCE_S
    while root.exists() and time.monotonic() < deadline:
        try:
            for folder in (*(path for path in root.iterdir() if path.is_dir()), root):
                folder.rmdir()
        except OSError:  # a process still ends
            time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
