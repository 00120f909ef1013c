"""Our entry point with a disk that fills up, and a folder that vanishes, after the first iterations.

The first argument is for it: the folder. TensorBoard and Weights & Biases are stand-ins: neither need be
installed.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
import types
from pathlib import Path
from typing import Any

from megatron_hexi.text_file import append_line


class FullDisk:
    """As much of `SummaryWriter` and the module `wandb` as Megatron uses, on a disk that fills up."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.config = types.SimpleNamespace(update=lambda values: None)

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        if iteration > 1:
            shutil.rmtree(self._folder, ignore_errors=True)
            self.flush()

    def add_text(self, name: str, value: str, global_step: int) -> None:
        """Megatron writes its arguments down when it starts."""

    def log(self, values: dict[str, Any], iteration: int) -> None:
        self.flush()

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    finish = flush


def _on_a_full_disk(path: Path, line: str) -> None:
    """The real write, where files may not grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        append_line(path, line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def main() -> None:
    """Train."""
    folder = sys.argv.pop(1)
    disk = FullDisk(folder)
    tensorboard, wandb = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("wandb")
    vars(tensorboard)["SummaryWriter"] = lambda **kwargs: disk
    vars(wandb).update(
        init=lambda **kwargs: None, config=disk.config, log=disk.log, finish=disk.finish, run=None
    )
    sys.modules |= {"torch.utils.tensorboard": tensorboard, "wandb": wandb}
    from megatron_hexi import pretrain_gpt
    from megatron_hexi.megatron import metrics

    vars(metrics)["append_line"] = _on_a_full_disk
    pretrain_gpt.main()
