"""Checkpoints whose optimizer state cannot be loaded into this job are refused by name.

Megatron ends such a job with an exception that names no option or a wrong one; in the legacy format some
ranks end with exit code 0 and without a word that something is wrong.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed

from megatron_hexi.errors import CheckpointError, user_errors
from megatron_hexi.patching import Patch

#: What decides which parameters a rank has: sizes that the formats tied to it must find again.
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_RESHARD = "save it again with --dist-ckpt-optim-fully-reshardable"
_FRESH = "--no-load-optim starts a new optimizer"


def check_optimizer_state(folder: str, args: Namespace, saved: Namespace, sharding: str | None) -> None:
    """Refuse a checkpoint whose optimizer state Megatron cannot load into this job.

    Args:
        folder: that of ``--load``, for the message.
        args: this job's arguments.
        saved: those in the checkpoint.
        sharding: its ``distrib_optim_sharding_type``; ``None`` where it has none.

    Raises:
        CheckpointError: with the option, both values, and the remedy.
    """
    here, there = args.use_distributed_optimizer, saved.use_distributed_optimizer
    if here != there:
        raise CheckpointError(
            f"--load {folder}: it was saved {_with(there)} --use-distributed-optimizer, this job trains "
            f"{_with(here)} it; train {_with(there)} it, or {_FRESH}"
        )
    if sharding == "dp_reshardable":
        for name in _LAYOUT:
            size, other = getattr(args, name, None), getattr(saved, name, None)
            if size != other:
                raise CheckpointError(
                    f"--load {folder}: it was saved with --{name.replace('_', '-')} {other}, this job has "
                    f"{size}, and its optimizer state is in Megatron's default format; train with {other}, "
                    f"or {_RESHARD} there; {_FRESH}"
                )


def _with(used: bool) -> str:
    return "with" if used else "without"


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    @functools.wraps(original)
    def load_base_checkpoint(load_dir: Any, args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        try:
            loaded = original(load_dir, args, *rest, **kwargs)
        except SystemExit:
            if load_dir is None or not Path(get_checkpoint_tracker_filename(load_dir)).is_file():
                raise  # --exit-on-missing-checkpoint
            with user_errors():
                raise CheckpointError(
                    f"--load {load_dir}: it has no file for this rank, or one that cannot be read; what was "
                    "saved with --ckpt-format torch needs the same --tensor-model-parallel-size and "
                    "--pipeline-model-parallel-size: train with those, or save with --ckpt-format torch_dist"
                ) from None
        state, _, release, _ = loaded
        saved = state.get("args") if state else None
        # Before the groups are there, only arguments are read (--use-checkpoint-args).
        if saved is None or release or not torch.distributed.is_initialized() or not _wanted(args, saved):
            return loaded
        content = state.get("content_metadata") or {}
        with user_errors():
            check_optimizer_state(load_dir, args, saved, content.get("distrib_optim_sharding_type"))
        return loaded

    return load_base_checkpoint


def _wanted(args: Namespace, saved: Namespace) -> bool:
    """Whether the optimizer's state is in the checkpoint, and is to be loaded."""
    known = args.ckpt_format in ("torch", "torch_dist") and hasattr(saved, "use_distributed_optimizer")
    return known and not (args.finetune or args.no_load_optim or saved.no_save_optim)


def _with_same_buckets(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.dist_checkpointing import ShardedTensor, load_tensors_metadata
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    @functools.wraps(original)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, **kwargs: Any) -> Any:
        buckets = {
            tensor.key: tuple(tensor.global_shape)
            for tensor in nested_values(sharded_state_dict)
            if isinstance(tensor, ShardedTensor) and ".bucket_idx_" in tensor.key
        }
        if buckets:
            saved = load_tensors_metadata(str(checkpoint_dir))
            found = {key: tuple(saved[key].global_shape) for key in buckets if key in saved}
            with user_errors():
                if found != buckets:
                    raise CheckpointError(
                        f"--load {checkpoint_dir}: its optimizer state is in Megatron's default format, and in "
                        "other buckets than this job's; train with the --overlap-grad-reduce, "
                        "--ddp-bucket-size, --ddp-num-buckets and layers of a stage that it was saved with, "
                        f"or {_RESHARD} there; {_FRESH}"
                    )
        return original(sharded_state_dict, checkpoint_dir, *rest, **kwargs)

    return load


_EARLIER = ("load_dir", "args", "rank0", "sharded_state_dict", "checkpointing_context")
_OF_LOAD = ("validate_access_integrity", "strict")

RESUME_PATCHES = (
    Patch(
        target="megatron.training.checkpointing:_load_base_checkpoint",
        why="refuses a checkpoint whose optimizer state this job cannot load",
        build=_checked,
        parameters={
            "<0.19": _EARLIER,
            ">=0.19": (*_EARLIER, "dp_cp_group", "expt_dp_group", "gpt_compat_layer_maps"),
        },
    ),
    Patch(
        target="megatron.core.dist_checkpointing.serialization:load",
        why="refuses a checkpoint whose optimizer state is in other buckets",
        build=_with_same_buckets,
        parameters={
            "<0.19": (
                *("sharded_state_dict", "checkpoint_dir", "sharded_strategy", "common_strategy"),
                *(*_OF_LOAD, "verify_integrity"),
            ),
            ">=0.19": (
                *("sharded_state_dict", "checkpoint_dir", "sharded_strategy"),
                *(*_OF_LOAD, "verify_integrity", "process_group"),
            ),
        },
    ),
)
