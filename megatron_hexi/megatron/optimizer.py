"""The distributed optimizer with torch's own Adam, where neither apex nor Transformer Engine is installed.

That Adam keeps a step count in each parameter's state. Megatron reads it before the first step, when there is
none yet; gives all parameters one shared count, which each of them then advances; looks for it among the
loaded tensors, where it is not; and in the default format finds the count from before the load. Without these
patches such a job can save a checkpoint but not load it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_hexi.patching import patched


@patched(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
    why="lets a checkpoint be loaded before the first step without apex and Transformer Engine",
)
def _with_state(original: Callable[[Any], Any], self: Any) -> Any:
    from megatron.core.optimizer import distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE and not self.optimizer.state:
        self.init_state_fn(self.optimizer, self.config)
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(0.0)
    return original(self)


@patched(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
    why="takes no step count from the loaded tensors, and writes to views of fp32 parameters",
)
def _without_loaded_step(
    original: Callable[..., None], self: Any, model_param: Any, tensors: dict[str, Any]
) -> None:
    with torch.no_grad():
        # An fp32 shard is a view of a parameter, which must not be written to under autograd. Anything but a
        # tensor is not copied.
        original(self, model_param, {**tensors, "step": None})


@patched(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
    why="gives every parameter a step count of its own",
)
def _with_own_steps(original: Callable[..., Any], self: Any, state_dict: Any) -> Any:
    result = original(self, state_dict)
    for state in self.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    return result


OPTIMIZER_PATCHES = (
    _with_state,
    _with_own_steps,
    _without_loaded_step,
)
