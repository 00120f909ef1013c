"""``--hexi-metrics PATH``: what an iteration gave, at full precision, one JSON line each.

Megatron's log rounds losses to seven digits and gradient norms to three decimals, which is too little to
compare two layouts by. The rank that writes Megatron's log (the last) writes this file too.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_hexi.patching import Patch

#: Seconds that the last training step took on this rank; Megatron logs a step after it has returned.
_step_seconds: float | None = None


def record(path: Path, iteration: int, losses: dict[str, float], **values: float | None) -> None:
    """Append one iteration to a metrics file.

    Args:
        path: the file; its directory is made when missing.
        iteration: counted from 1.
        losses: the losses by Megatron's names (``"lm loss"``), each the mean over the batch's tokens.
        values: more numbers of the iteration.
    """
    named = {name.replace(" ", "_"): value for name, value in losses.items()}
    named["loss"] = named.pop("lm_loss", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"iteration": iteration, **named, **values}) + "\n")


def _timed(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training import get_args

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        global _step_seconds
        if get_args().hexi_metrics is None:
            return original(*args, **kwargs)
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        torch.cuda.synchronize()
        _step_seconds = time.perf_counter() - begin
        return result

    return train_step


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training import get_args, is_last_rank

    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        path = get_args().hexi_metrics
        if path is not None and is_last_rank():
            logged = signature.bind(*args, **kwargs).arguments
            record(
                Path(path),
                logged["iteration"],
                {name: float(value) for name, value in logged["loss_dict"].items()},
                grad_norm=_number(logged["grad_norm"]),
                learning_rate=_number(logged["learning_rate"]),
                skipped=logged["skipped_iter"],
                seconds=_step_seconds,
            )
        return original(*args, **kwargs)

    return training_log


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


_STEP_PARAMETERS = (
    *("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
    *("forward_backward_func", "iteration", "pg_collection", "p2p_communicator"),
)
_LOG_PARAMETERS = (
    *("loss_dict", "total_loss_dict", "learning_rate", "iteration", "loss_scale", "report_memory_flag"),
    *(
        "skipped_iter",
        "grad_norm",
        "params_norm",
        "num_zeros_in_grad",
        "max_attention_logit",
        "pg_collection",
    ),
    *("is_first_iteration", "seqlen_squared_sum_in_batch", "total_real_tokens_in_batch"),
)

METRICS_PATCHES = (
    Patch(
        target="megatron.training.training:train_step",
        why="times a step for --hexi-metrics",
        build=_timed,
        parameters=_STEP_PARAMETERS,
    ),
    Patch(
        target="megatron.training.training:training_log",
        why="writes what --hexi-metrics asks for",
        build=_recorded,
        parameters=_LOG_PARAMETERS,
    ),
)
