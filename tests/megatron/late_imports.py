"""A training script that names each module whose import in a rank, after the fork, takes long."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

_LONG_S = 0.05


def _timed(load: Any) -> Any:
    depth = 0

    @functools.wraps(load)
    def find_and_load(name: str, *rest: Any) -> Any:
        nonlocal depth
        begin, depth = time.thread_time(), depth + 1
        try:
            return load(name, *rest)
        finally:
            depth -= 1
            seconds = time.thread_time() - begin
            if depth == 0 and seconds > _LONG_S:
                print(f"late import: {name} took {seconds:.2f} s of a core", file=sys.stderr, flush=True)

    return find_and_load


def main() -> None:
    """Train."""
    bootstrap: Any = sys.modules["_frozen_importlib"]
    bootstrap._find_and_load = _timed(bootstrap._find_and_load)
    from megatron_hexi import pretrain_gpt

    pretrain_gpt.main()


if __name__ == "__main__":
    main()
