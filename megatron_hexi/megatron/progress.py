"""Reports of a run whenever Megatron logs: tokens/s, busy and waiting time of each rank.

After a small all-gather, rank 0 writes the record (``--hexi-record``), and the last rank, which writes
Megatron's log, adds to its line, to TensorBoard and to Weights & Biases.
"""

from __future__ import annotations

import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_hexi.elastic.training.goodput import log_words as round_log_words
from megatron_hexi.megatron.expert_loads import LOADS
from megatron_hexi.megatron.metrics import LOG_PARAMETERS
from megatron_hexi.megatron.optional_output import OptionalOutput
from megatron_hexi.megatron.record_writer import RecordWriter
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.megatron.step_times import METER
from megatron_hexi.patching import patched
from megatron_hexi.record import Interval, RankTimes
from megatron_hexi.runtime.waiting import WAITS, StepTimes

#: Most ranks that the log line names one by one; of more, it names the least and the most busy.
_NAMED_RANKS = 16
_MILLI = 1e3
_RECORD = OptionalOutput("--hexi-record")

#: Iterations that are not logged yet, with their losses (``None`` except on the last pipeline stage).
_unlogged: list[tuple[int, torch.Tensor | None]] = []
#: The last step whose waits were measured, if any.
_last_measured: list[StepTimes] = []
#: End of the next line of Megatron's log.
_line_end = ""
_recorder: RecordWriter | None = None


def gather_interval(
    iterations: Sequence[int],
    losses: Sequence[torch.Tensor | None],
    steps: Sequence[StepTimes],
    tokens: int,
    session: Session,
    args: Namespace,
) -> Interval:
    """Return the measurements of all ranks, on every rank; collectives of all ranks.

    Args:
        losses: loss of each iteration; ``None`` where this rank does not know it.
    """
    count = len(steps)
    known = [math.nan if loss is None else float(loss) for loss in losses]
    mean = sum(step.seconds for step in steps) / count
    means = [mean, *(mean * share for share in _waiting_shares(steps))]
    mine = [torch.cuda.max_memory_allocated(), *means, *(step.seconds for step in steps), *known]
    # gloo gathers on the CPU only.
    device = "cpu" if dist.get_backend() == dist.Backend.GLOO else session.shard.positions.device
    sent = torch.tensor(mine, dtype=torch.float64, device=device)
    all_ranks = sent.new_empty(dist.get_world_size(), len(mine))
    dist.all_gather_into_tensor(all_ranks.view(-1), sent)
    peak, step, *waits, step_columns = all_ranks.cpu().split([1, 1, *[1] * len(WAITS), 2 * count], dim=1)
    seconds, loss_columns = step_columns.split(count, dim=1)
    waited = {
        f"{kind}_s": tuple(column.flatten().tolist()) for kind, column in zip(WAITS, waits, strict=True)
    }
    return Interval(
        iterations=tuple(iterations),
        seconds=tuple(seconds.amax(dim=0).tolist()),
        losses=tuple(_known(column) for column in loss_columns.T.tolist()),
        tokens=tokens,
        ranks=RankTimes(
            step_s=tuple(step.flatten().tolist()),
            peak_bytes=tuple(map(int, peak.flatten().tolist())),
            **waited,
        ),
        expert_imbalance=LOADS.take(args, device),
    )


def _waiting_shares(steps: Sequence[StepTimes]) -> list[float]:
    """Return the part of a step spent in each of `WAITS`, by the measured steps or else the last one."""
    global _last_measured
    measured = [step for step in steps if step.waited] or _last_measured
    _last_measured = measured[-1:]
    seconds = sum(step.seconds for step in measured) or 1.0
    return [sum(step.waited[kind] for step in measured) / seconds for kind in WAITS]


def log_words(interval: Interval) -> str:
    """Return the words that we append to Megatron's log line: tokens/s, idle share, busy ms of each rank."""
    busy = [seconds * _MILLI for seconds in interval.ranks.busy_s]
    ranks, title = list(range(len(busy))), "busy"
    if len(busy) > _NAMED_RANKS:
        ranks, title = sorted(ranks, key=busy.__getitem__)[:: len(busy) - 1], "least and most busy"
    named = ", ".join(f"{rank}: {busy[rank]:.1f}" for rank in ranks)
    idle = f"idle share: {interval.ranks.idle_share:.1%}"
    loads = interval.expert_imbalance
    experts = "" if loads is None else f" expert imbalance: {loads:.3f} |"
    return f" tokens/s: {interval.tokens_per_s:.0f} | {idle} | {title} by rank (ms): {named} |{experts}"


def scalars(interval: Interval) -> dict[str, float]:
    """Return the values for TensorBoard and Weights & Biases, by name."""
    ranks = interval.ranks
    values = {"hexi/tokens-per-second": interval.tokens_per_s, "hexi/idle-share": ranks.idle_share}
    if interval.expert_imbalance is not None:
        values["hexi/expert-imbalance"] = interval.expert_imbalance
    for rank, (busy, share) in enumerate(zip(ranks.busy_s, ranks.idle_shares, strict=True)):
        values |= {f"hexi-busy-seconds/rank-{rank}": busy, f"hexi-idle-share/rank-{rank}": share}
    return values


@patched(
    "megatron.training.training:training_log",
    why="gives ranks' busy and waiting time to the record and Megatron's writers",
    parameters=LOG_PARAMETERS,
)
def _with_progress(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args

    global _line_end
    session = active_session()
    if session is None:
        return original(*args, **kwargs)
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    iteration = call.arguments["iteration"]
    LOADS.end_iteration()
    _unlogged.append((iteration, call.arguments["loss_dict"].get("lm loss")))
    if iteration % get_args().log_interval == 0 or call.arguments["is_first_iteration"]:
        _line_end = _log_interval(session)
    result = original(*args, **kwargs)
    _line_end = ""
    return result


def _log_interval(session: Session) -> str:
    from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    global _recorder
    numbers, losses = zip(*_unlogged, strict=True)
    _unlogged.clear()
    # Megatron waits for the device too before it logs.
    tokens = get_current_running_global_batch_size() * session.seq_length
    interval = gather_interval(numbers, losses, METER.take(), tokens, session, get_args())
    # On every rank, whatever its flags: the constructor calls a collective.
    _recorder = _recorder or RecordWriter(session, get_args())
    _RECORD.attempt(_recorder.write, interval, session.given.digest)
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard:
        for name, value in scalars(interval).items():
            tensorboard.add_scalar(name, value, numbers[-1])
    if wandb:
        wandb.log(scalars(interval), numbers[-1])
    return (
        log_words(interval)
        + round_log_words()
        + (f" plan: {session.given.digest[:12]} since iteration {session.since} |" if session.since else "")
    )


def close_interval(session: Session) -> None:
    """Log the iterations that are not logged yet, before another plan begins.

    A collective of all ranks. Megatron's log lacks these iterations, the record has them.
    """
    if _unlogged:
        _log_interval(session)


@patched(
    "megatron.training.training:print_rank_last",
    why="adds tokens/s, idle share and ranks' times to Megatron's log line",
)
def _with_line_end(original: Callable[[str], None], message: str) -> None:
    global _line_end
    end, _line_end = _line_end, ""
    original(message + end)


def _known(losses: Sequence[float]) -> float | None:
    """Return the loss that some rank knows; ``None`` where no loss is finite."""
    return next((loss for loss in losses if math.isfinite(loss)), None)


PROGRESS_PATCHES = (
    _with_progress,
    _with_line_end,
)
