"""Our entry point with one rank made slow on purpose, and writers that write to a file.

The first three arguments are for it: the slow rank, the seconds that it sleeps in every MLP, and a file that
the last rank's writers append to.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Scalars:
    """As much of both writers as Megatron and we use."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([name, float(value), int(iteration)]) + "\n")

    def log(self, values: dict[str, Any], iteration: int) -> None:
        for name, value in values.items():
            self.add_scalar(f"wandb {name}", value, iteration)


def main() -> None:
    """Train."""
    slow, seconds, scalars = sys.argv[1:4]
    del sys.argv[1:4]
    import megatron.training
    from megatron.core.transformer.mlp import MLP

    from megatron_hexi import pretrain_gpt

    if os.environ["RANK"] == slow:
        forward = MLP.forward

        @functools.wraps(forward)
        def slowed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(float(seconds))
            return forward(*args, **kwargs)

        MLP.forward = slowed
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        megatron.training.get_tensorboard_writer = lambda: Scalars(scalars)
        megatron.training.get_wandb_writer = lambda: Scalars(scalars)
    pretrain_gpt.main()
