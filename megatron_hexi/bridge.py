"""Megatron Bridge's training under a plan: ``from megatron_hexi.bridge import pretrain, finetune``.

Import this module before Megatron and Bridge: it changes both (`megatron_hexi.adaptor`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_hexi.adaptor  # noqa: F401

# isort: split

from megatron.bridge.training import finetune as _finetune
from megatron.bridge.training import pretrain as _pretrain

from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.megatron.bridge_job import given_options

__all__ = ["finetune", "pretrain"]


def pretrain(config: Any, forward_step_func: Any, *, plan: str | Path, callbacks: Any = None) -> None:
    """Train as Bridge's `pretrain` does, by a plan.

    Args:
        config: Bridge's `ConfigContainer`; what the plan decides is set in it, such as context_parallel_size.
        forward_step_func: as Bridge's, for example its `gpt_step.forward_step`.
        plan: the plan's file.
        callbacks: as Bridge's.

    Raises:
        SystemExit: the plan is wrong or was made for another job; the reason is on standard error.
    """
    _train(_pretrain.pretrain, config, forward_step_func, plan, callbacks)


def finetune(config: Any, forward_step_func: Any, *, plan: str | Path, callbacks: Any = None) -> None:
    """Train as Bridge's `finetune` does, from a checkpoint, by a plan: see `pretrain`."""
    _train(_finetune.finetune, config, forward_step_func, plan, callbacks)


def _train(train: Any, config: Any, forward_step_func: Any, plan: str | Path, callbacks: Any) -> None:
    with user_errors():
        options = given_options()
        if options.hexi_plan is not None:
            raise HexiError(
                f"--hexi-plan {options.hexi_plan}: the script names {plan}; leave --hexi-plan out"
            )
    options.hexi_plan = str(plan)
    try:
        train(config, forward_step_func, callbacks=callbacks)
    finally:
        options.hexi_plan = None
