"""Checks of checkpoints: one that cannot be loaded into this job is refused, and the error names the cause.

Megatron ends such a job with an exception that names no option or a wrong one; in the legacy format some
ranks end with exit code 0 and without a message.
"""

from __future__ import annotations

import functools
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed

from megatron_hexi.errors import CheckpointError, user_errors
from megatron_hexi.kinds.states import hybrid_layers
from megatron_hexi.megatron.checkpoint_files import first_problem, lacks, why_unreadable
from megatron_hexi.megatron.folders import (
    iteration_folder,
    iterations_hint,
    loaded_folder,
    tracked_iteration,
)
from megatron_hexi.megatron.saved_tensors import saved_tensors
from megatron_hexi.patching import Patch

#: Sizes that decide which parameters a rank has: formats that depend on them need equal values.
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_RESHARD = "save again from the old job with --dist-ckpt-optim-fully-reshardable"
_FRESH = "add --no-load-optim to start a new optimizer"


#: Arguments of Megatron that decide on names and shapes of weights.
_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention"),
    *("num_query_groups", "kv_channels", "num_experts", "moe_ffn_hidden_size", "swiglu", "add_bias_linear"),
    *("untie_embeddings_and_output_weights", "normalization", "multi_latent_attention", "qk_layernorm"),
)
_SCHEDULE = re.compile(r"class input value (\S+) and checkpoint\s*value (\S+) for (.+) do not match")


def check_model(folder: str, args: Namespace, saved: Namespace) -> None:
    """Refuse a checkpoint of another model, by its arguments.

    Raises:
        CheckpointError: the models differ; the message has the options and both values.
    """
    if hybrid_layers(args).replace("|", "") != hybrid_layers(saved).replace("|", ""):
        return  # Megatron loads a GPT into a hybrid model
    grouped = getattr(args, "group_query_attention", False)
    differ = [
        name
        for name in _MODEL
        if (grouped or name != "num_query_groups")
        and hasattr(saved, name)
        and hasattr(args, name)
        and None not in (getattr(saved, name), getattr(args, name))
        and getattr(saved, name) != getattr(args, name)
    ]
    if differ:
        there, here = (_spelt(differ, values) for values in (saved, args))
        raise CheckpointError(
            f"--load {folder}: the checkpoint is of another model: it has {there}, this job {here}; train "
            f"with {there}, or load a checkpoint of this model"
        )


def _spelt(names: Sequence[str], values: Namespace) -> str:
    return ", ".join(f"{name.replace('_', '-')} {getattr(values, name)}" for name in names)


def check_optimizer_state(folder: str, args: Namespace, saved: Namespace, sharding: str | None) -> None:
    """Refuse a checkpoint whose optimizer state Megatron cannot load into this job, by its arguments.

    Its ``distrib_optim_sharding_type`` is ``None`` where it has none.

    Raises:
        CheckpointError: Megatron cannot load it; the message has the option, both values, and the remedy.
    """
    here, there = args.use_distributed_optimizer, saved.use_distributed_optimizer
    if here != there:
        raise CheckpointError(
            f"--load {folder}: the checkpoint was saved {_with(there)} --use-distributed-optimizer, this job "
            f"trains {_with(here)} it; train {_with(there)} it, or {_FRESH}"
        )
    sizes = saved.expert_model_parallel_size, args.expert_model_parallel_size
    if min(sizes) == 1 < max(sizes):
        raise CheckpointError(
            f"--load {folder}: the checkpoint was saved with --expert-model-parallel-size {sizes[0]}, this "
            f"job has {sizes[1]}; above 1 Megatron keeps the optimizer state of experts apart; {_FRESH}"
        )
    if sharding == "dp_reshardable":
        for name in _LAYOUT:
            if getattr(saved, name, None) != getattr(args, name, None):
                raise CheckpointError(
                    f"--load {folder}: the checkpoint was saved with --{name.replace('_', '-')} "
                    f"{getattr(saved, name)}, this job has {getattr(args, name)}, and the format of "
                    "its optimizer state is Megatron's default; train with "
                    f"{getattr(saved, name)}, or {_RESHARD}, or {_FRESH}"
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
                    f"--load {load_dir}: the file of this rank is missing or cannot be read: what was "
                    "saved with --ckpt-format torch is loaded under the same --tensor-model-parallel-size "
                    "and --pipeline-model-parallel-size alone; train with those, or save with --ckpt-format "
                    "torch_dist"
                ) from None
        state, _, release, _ = loaded
        saved = state.get("args") if state else None
        if saved is not None and torch.distributed.is_initialized():
            with user_errors():
                check_model(load_dir, args, saved)
        # Before groups exist, only arguments are read (--use-checkpoint-args).
        if saved is None or release or not torch.distributed.is_initialized() or not _wanted(args, saved):
            return loaded
        content = state.get("content_metadata") or {}
        with user_errors():
            check_optimizer_state(load_dir, args, saved, content.get("distrib_optim_sharding_type"))
        return loaded

    return load_base_checkpoint


def _named(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training import get_args
    from torch.distributed.checkpoint.api import CheckpointException

    @functools.wraps(original)
    def load(first: Any, *rest: Any, **kwargs: Any) -> Any:
        try:
            return original(first, *rest, **kwargs)
        except (Exception, CheckpointException) as problem:  # torch's is a BaseException
            args = first if isinstance(first, Namespace) else get_args()
            message = _why(problem, args)
            if message is None:
                raise
            with user_errors():
                raise CheckpointError(f"{' '.join(loaded_folder(args) or ())}: {message}") from problem

    return load


def _why(problem: BaseException, args: Namespace) -> str | None:
    """Return an error message about a checkpoint with the remedy; ``None`` if the cause is unknown."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    problem = first_problem(problem)
    text = " ".join(str(problem).split())
    if schedule := _SCHEDULE.search(text):
        here, there, setting = schedule.groups()
        # Megatron counts a schedule in samples, whatever it calls them; the batch may have changed since.
        name = setting.replace("iterations", "samples")
        return (
            f"{name} was {there} in its training, in this job it is {here}; give the "
            "--train-iters (or --lr-decay-iters), batch and learning rate of its training, or add "
            "--override-opt-param-scheduler to go on by this job's, or --use-checkpoint-opt_param-scheduler "
            "by the checkpoint's"
        )
    folder = Path((loaded_folder(args) or ("", ""))[1])
    step = args.ckpt_step if args.ckpt_step is not None else tracked_iteration(str(folder))
    if damage := lacks(iteration_folder(folder, step)) or why_unreadable(problem):
        return f"iteration {step} cannot be read: {damage}; {iterations_hint(folder, step)}"
    if isinstance(problem, CheckpointingException) or "size mismatch" in text or "shape mismatch" in text:
        last = f"{type(problem).__name__}: {text[:300]}"
        return f"its weights are not those of this model ({last}); load a checkpoint of this model"
    return None


def _wanted(args: Namespace, saved: Namespace) -> bool:
    """Whether the checkpoint has the optimizer's state, and this job loads it."""
    known = args.ckpt_format in ("torch", "torch_dist") and hasattr(saved, "use_distributed_optimizer")
    return known and not (args.finetune or args.no_load_optim or saved.no_save_optim)


def _with_same_buckets(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    @functools.wraps(original)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, **kwargs: Any) -> Any:
        buckets = {
            tensor.key: tuple(tensor.global_shape)
            for tensor in nested_values(sharded_state_dict)
            if isinstance(tensor, ShardedTensor) and ".bucket_idx_" in tensor.key
        }
        if buckets:
            saved = saved_tensors(checkpoint_dir)
            saved_buckets = {key: saved[key][0] for key in buckets if key in saved}
            with user_errors():
                if saved_buckets != buckets:
                    raise CheckpointError(
                        f"--load {checkpoint_dir}: its optimizer state is in Megatron's default format, and "
                        "in other buckets than this job has; train with the same --overlap-grad-reduce, "
                        "--ddp-bucket-size, --ddp-num-buckets and layers of a stage, or "
                        f"{_RESHARD}, or {_FRESH}"
                    )
        return original(sharded_state_dict, checkpoint_dir, *rest, **kwargs)

    return load


_EARLIER = ("load_dir", "args", "rank0", "sharded_state_dict", "checkpointing_context")
_OF_LOAD = ("validate_access_integrity", "strict")

RESUME_PATCHES = (
    *(
        Patch(
            target=f"megatron.training.checkpointing:{name}",
            why="names the cause where a checkpoint cannot be loaded",
            build=_named,
        )
        for name in ("load_checkpoint", "load_args_from_checkpoint")
    ),
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
