"""Our entry point in fp32 with some steps skipped: ``--skipping 0,1`` names them, from 0."""

from __future__ import annotations

import itertools
import sys
from typing import Any


def main() -> None:
    """Train as a loss scaler would that finds infinite gradients in these steps."""
    from megatron.core.optimizer.optimizer import FP32Optimizer

    from megatron_hexi import pretrain_gpt

    place = sys.argv.index("--skipping")
    skipped = {int(number) for number in sys.argv[place + 1].split(",")}
    del sys.argv[place : place + 2]
    steps, prepare = itertools.count(), FP32Optimizer.prepare_grads

    def prepare_grads(self: Any) -> bool:
        return bool(prepare(self)) or next(steps) in skipped

    FP32Optimizer.prepare_grads = prepare_grads
    pretrain_gpt.main()
