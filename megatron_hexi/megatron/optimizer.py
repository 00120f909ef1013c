"""The distributed optimizer with torch's own Adam, where neither apex nor Transformer Engine is installed.

That Adam keeps a step count in each parameter's state. Megatron reads it before the first step, when there is
none yet; gives all parameters one shared count, which each of them then advances; looks for it among the
loaded tensors, where it is not; and in the default format finds the count from before the load. Without these
patches such a job can save a checkpoint but not load it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_hexi.patching import Patch


def _with_state(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from megatron.core.optimizer import distrib_optimizer

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if not distrib_optimizer.HAVE_APEX_OR_TE and not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        return original(self)

    return state_dict


def _without_loaded_step(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        with (
            torch.no_grad()
        ):  # an fp32 shard is a view of a parameter, which must not be written to under autograd
            original(self, model_param, {**tensors, "step": None})  # anything but a tensor is not copied

    return set_main_param_and_optimizer_states


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return result

    return load_state_dict


OPTIMIZER_PATCHES = (
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        why="lets a checkpoint be loaded before the first step without apex and Transformer Engine",
        build=_with_state,
        parameters=("self",),
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        why="gives every parameter a step count of its own",
        build=_with_own_steps,
        parameters=("self", "state_dict"),
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        why="takes no step count from the loaded tensors, and writes to views of fp32 parameters",
        build=_without_loaded_step,
        parameters=("self", "model_param", "tensors"),
    ),
)
