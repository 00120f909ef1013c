"""A training script whose iterations take a quarter of a second: time for a test to do something."""

from __future__ import annotations

import functools
import time
from typing import Any

from megatron.training import training

from megatron_hexi import pretrain_gpt

_SECONDS = 0.25


def _paced(original: Any) -> Any:
    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        time.sleep(_SECONDS)
        return original(*args, **kwargs)

    return train_step


def main() -> None:
    """Train."""
    setattr(training, "train_step", _paced(training.train_step))  # noqa: B010
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
