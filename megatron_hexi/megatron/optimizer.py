"""Checkpoints of the distributed optimizer: with torch's own Adam, and with buckets that end in padding.

Torch's Adam serves where neither apex nor Transformer Engine is installed. It keeps a step count in each
parameter's state. Megatron reads it before the first step, when there is none yet; gives all parameters one
shared count, which each of them then advances; looks for it among the loaded tensors, where it is not; and in
the default format finds the count from before the load. Without these patches such a job can save a
checkpoint but not load it.

A bucket of gradients is padded to a multiple of the data-parallel size, context parallelism included: most
buckets with three ranks, few with a power of two. Megatron saves the buckets without their padding, but

- in the fully reshardable format, with several buckets, looks up each parameter at its place with padding:
  all parameters behind the first padding are saved shifted, and the last ones as zeros, with a warning in
  the log;
- in the default format, fills the gap behind a rank's last parameter beyond the end of the saved data, and
  the checkpoint is refused as inconsistent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_hexi.patching import patched

_PARAMETERS = ("self", "model_sharded_state_dict", "is_loading", "metadata")


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


@patched(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
    why="saves each parameter's optimizer state also behind the padding of a bucket",
    parameters=_PARAMETERS,
)
def _looked_up_without_padding(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    padded = [buffer.param_index_map for buffer in self.buffers]
    try:
        for buffer in self.buffers:
            buffer.param_index_map = _unpadded_index_map(buffer)
        return original(self, *args, **kwargs)
    finally:
        for buffer, index_map in zip(self.buffers, padded, strict=True):
            buffer.param_index_map = index_map


def _unpadded_index_map(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return begin, end and bucket of each parameter, in elements, for buckets without padding."""
    padding, shift = 0, {}
    for bucket in buffer.buckets:
        shift[bucket.bucket_id] = padding
        padding += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        param: (begin - shift[bucket], end - shift[bucket], bucket)
        for param, (begin, end, bucket) in buffer.param_index_map.items()
    }


@patched(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_dp_reshardable",
    why="fills a bucket's gaps up to the end of its saved data",
    parameters=_PARAMETERS,
)
def _filled_to_the_end(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    state = original(self, *args, **kwargs)
    for number in range(len(self.buffers)):
        for buckets in state[number].values():
            for part in (part for bucket in buckets for part in bucket):
                for key, tensor in part.items():
                    if isinstance(tensor, ShardedTensor):
                        part[key] = _cut(tensor)
    return state


def _cut(tensor: Any) -> Any:
    """Return a shard of a vector without the part beyond the vector's end."""
    length = min(tensor.local_shape[0], tensor.global_shape[0] - tensor.global_offset[0])
    return replace(tensor, data=tensor.data[:length], local_shape=(length,))


OPTIMIZER_PATCHES = (
    _with_state,
    _with_own_steps,
    _without_loaded_step,
    _looked_up_without_padding,
    _filled_to_the_end,
)
