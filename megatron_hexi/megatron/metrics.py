"""``--hexi-metrics PATH``: the results of each iteration at full precision, as JSON lines.

Megatron's log rounds losses to seven digits and gradient norms to three decimals, which is too little to
compare two layouts by. The rank that writes Megatron's log (the last) writes this file too; with
``{rank}`` in the path, every rank writes its own. Processor time shows the work of a rank; wall-clock seconds
include waiting for others. Under a plan with experts, an iteration that Megatron logs has the imbalance of
their loads since the last one.
"""

from __future__ import annotations

import inspect
import json
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_hexi.megatron.expert_loads import LOADS
from megatron_hexi.megatron.optional_output import OptionalOutput
from megatron_hexi.patching import STEP_PARAMETERS, patched
from megatron_hexi.text_file import append_line, check_output

_LOG = (
    *("loss_dict", "total_loss_dict", "learning_rate", "iteration", "loss_scale", "report_memory_flag"),
    *("skipped_iter", "grad_norm", "params_norm", "num_zeros_in_grad", "max_attention_logit"),
    *("pg_collection", "is_first_iteration"),
)
#: Parameters of `megatron.training.training:training_log`, by version.
LOG_PARAMETERS = {
    "<0.18": _LOG,
    ">=0.18": (*_LOG, "seqlen_squared_sum_in_batch", "total_real_tokens_in_batch"),
}

#: Our names of losses, by Megatron's.
_NAMES = {"lm loss": "loss"}

_METRICS = OptionalOutput("--hexi-metrics")

#: Times of the last training step on this rank; Megatron logs a step after it has returned.
_step_times: dict[str, float] = {}


def check_metrics(args: Namespace) -> None:
    """Check that this rank's metrics file can be written.

    Raises:
        HexiError: the file cannot be written.
    """
    path = _own_path(args)
    if path is not None:
        check_output(path)


def record(path: Path, iteration: int, losses: dict[str, float], **values: float | None) -> None:
    """Append an iteration to a metrics file.

    Args:
        iteration: counted from 1.
        losses: the losses by Megatron's names (``"lm loss"``), each the mean over the batch's tokens.

    Raises:
        HexiError: the file cannot be written.
    """
    named = {_NAMES.get(name, name.replace(" ", "_")): value for name, value in losses.items()}
    append_line(path, json.dumps({"iteration": iteration, **named, **values}))


@patched(
    "megatron.training.training:train_step", why="times a step for --hexi-metrics", parameters=STEP_PARAMETERS
)
def _timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args

    global _step_times
    if get_args().hexi_metrics is None:
        return original(*args, **kwargs)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    result = original(*args, **kwargs)
    torch.cuda.synchronize()
    _step_times = {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu_begin,
    }
    return result


@patched(
    "megatron.training.training:training_log",
    why="writes the file of --hexi-metrics",
    parameters=LOG_PARAMETERS,
)
def _recorded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args

    path = _own_path(get_args())
    if path is not None:
        logged = inspect.signature(original).bind(*args, **kwargs).arguments
        _METRICS.attempt(
            record,
            path,
            logged["iteration"],
            {name: float(value) for name, value in logged["loss_dict"].items()},
            grad_norm=_number(logged["grad_norm"]),
            learning_rate=_number(logged["learning_rate"]),
            loss_scale=_number(logged["loss_scale"]),
            skipped=logged["skipped_iter"],
            **_step_times,
            **({} if LOADS.latest is None else {"expert_imbalance": LOADS.latest}),
        )
    return original(*args, **kwargs)


def _own_path(args: Namespace) -> Path | None:
    """Return the file that this rank writes; ``None`` if it writes none."""
    pattern: str | None = args.hexi_metrics
    if pattern is None:
        return None
    if "{rank}" in pattern:
        return Path(pattern.replace("{rank}", str(args.rank)))
    return Path(pattern) if args.rank == args.world_size - 1 else None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


METRICS_PATCHES = (
    _timed,
    _recorded,
)
