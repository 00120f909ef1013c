"""Faults in what a job that goes on has loaded of its optimizer; `planted` plants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _after_a_load(lose: Callable[[Any], None]) -> None:
    """Lose something of an optimizer that has loaded a checkpoint."""
    from megatron_hexi.megatron.stages.piece_optimizer import PieceOptimizer

    original = PieceOptimizer.load_state_dict

    def load_state_dict(self: PieceOptimizer, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        lose(self)

    PieceOptimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _a_step_short(optimizer: Any) -> None:
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            state["step"] -= 1
    for group in optimizer.optimizer.param_groups:
        if "step" in group:
            group["step"] -= 1


def _no_moment_of_one_weight(optimizer: Any) -> None:
    last = optimizer.owned[-1].main
    optimizer.optimizer.state[last]["exp_avg_sq"].zero_()


def _masters_of_the_model(optimizer: Any) -> None:
    """The fp32 weights are the model's, which are rounded."""
    for part in optimizer.owned:
        part.main.data.copy_(part.values)


def _growth_from_the_start(optimizer: Any) -> None:
    if optimizer.grad_scaler is not None:
        optimizer.grad_scaler._growth_tracker = 0


def _decay_of_biases(optimizer: Any) -> None:
    for group in optimizer.optimizer.param_groups:
        group["wd_mult"] = 1.0


def _schedule_from_the_start() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    original = OptimizerParamScheduler.load_state_dict

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        self.num_steps = 0

    OptimizerParamScheduler.load_state_dict = load_state_dict


#: Of what a job that goes on has loaded.
RESUME_FAULTS: dict[str, Callable[[], None]] = {
    "a-step-short": lambda: _after_a_load(_a_step_short),
    "no-moment-of-one-weight": lambda: _after_a_load(_no_moment_of_one_weight),
    "masters-of-the-model": lambda: _after_a_load(_masters_of_the_model),
    "growth-from-the-start": lambda: _after_a_load(_growth_from_the_start),
    "decay-of-biases": lambda: _after_a_load(_decay_of_biases),
    "schedule-from-the-start": _schedule_from_the_start,
}
