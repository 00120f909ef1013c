"""Our entry point, which says which step counts the optimizer has after a checkpoint is loaded."""

from __future__ import annotations

import functools
from typing import Any


def main() -> None:
    """Train."""
    from megatron.training import training

    from megatron_hexi import pretrain_gpt

    load = training.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(ddp_model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(ddp_model, optimizer, *args, **kwargs)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            states = list(part.optimizer.state.values())
            steps = sorted({float(state["step"]) for state in states})
            own = len({state["step"].data_ptr() for state in states}) == len(states)
            print(f"steps after the load: {steps}, {'each its own' if own else 'shared'}", flush=True)
        return result

    training.load_checkpoint = load_checkpoint
    pretrain_gpt.main()
