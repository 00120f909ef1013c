"""Our entry point with ``--data-limit BYTES``: what a rank may take from the building of its model on.

On the CPU platform what is offloaded is in shared mappings, which the limit does not count: so it is the
memory of a device.
"""

from __future__ import annotations

import ctypes
import functools
import re
import resource
import sys
from pathlib import Path
from typing import Any

#: `mallopt`'s number of the size from which memory is mapped, and so given back when it is freed.
_MMAP_THRESHOLD = -3


def main() -> None:
    """Train."""
    from megatron.training import training

    from megatron_hexi import pretrain_gpt

    place = sys.argv.index("--data-limit")
    limit = int(sys.argv[place + 1])
    del sys.argv[place : place + 2]
    original = training.setup_model_and_optimizer

    @functools.wraps(original)
    def setup(*args: Any, **kwargs: Any) -> Any:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**17)
        found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        most = int(found[1]) * 1024 + limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return original(*args, **kwargs)

    training.setup_model_and_optimizer = setup
    pretrain_gpt.main()
