"""What a run under a plan tells whenever Megatron logs: how fast, who works how long, who waits.

One small all-gather an interval, then rank 0 writes the record (``--hexi-record``), and the last rank, which
writes Megatron's log, adds to its line, to TensorBoard and to Weights & Biases.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_hexi.elastic.training.goodput import log_words as round_log_words
from megatron_hexi.megatron.metrics import LOG_PARAMETERS
from megatron_hexi.megatron.onlookers import Onlooker
from megatron_hexi.megatron.recording import Recorder
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.megatron.step_times import METER
from megatron_hexi.patching import Patch
from megatron_hexi.record import Interval, RankTimes
from megatron_hexi.runtime.waiting import WAITS, StepTimes

#: Up to so many ranks the log line names each; of more, the least and the most busy.
_NAMED_RANKS = 16
_MILLI = 1e3
_RECORD = Onlooker("--hexi-record")

#: Iterations and losses (none but on the last pipeline stage) that were not told of yet.
_untold: list[tuple[int, torch.Tensor | None]] = []
#: The last step whose waits were measured, if there is one.
_last_measured: list[StepTimes] = []
#: What the next line of Megatron's log ends with.
_line_end = ""
_recorder: Recorder | None = None


def gather_interval(
    iterations: Sequence[int],
    losses: Sequence[torch.Tensor | None],
    steps: Sequence[StepTimes],
    tokens: int,
    session: Session,
) -> Interval:
    """What all ranks measured, on every rank; a collective of all ranks.

    Args:
        iterations: numbers of the iterations.
        losses: their losses; ``None`` where this rank knows none.
        steps: what they took on this rank.
        tokens: of one iteration.
        session: says where this rank's tensors are.
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
    peak, step, *waits, rest = all_ranks.cpu().split([1, 1, *[1] * len(WAITS), 2 * count], dim=1)
    seconds, told = rest.split(count, dim=1)
    waited = {
        f"{kind}_s": tuple(column.flatten().tolist()) for kind, column in zip(WAITS, waits, strict=True)
    }
    return Interval(
        iterations=tuple(iterations),
        seconds=tuple(seconds.amax(dim=0).tolist()),
        losses=tuple(_known(column) for column in told.T.tolist()),
        tokens=tokens,
        ranks=RankTimes(
            step_s=tuple(step.flatten().tolist()),
            peak_bytes=tuple(map(int, peak.flatten().tolist())),
            **waited,
        ),
    )


def _waiting_shares(steps: Sequence[StepTimes]) -> list[float]:
    """Of each kind, the part of a step: of those that were measured, or else of the last one before."""
    global _last_measured
    measured = [step for step in steps if step.waited] or _last_measured
    _last_measured = measured[-1:]
    seconds = sum(step.seconds for step in measured) or 1.0
    return [sum(step.waited[kind] for step in measured) / seconds for kind in WAITS]


def log_words(interval: Interval) -> str:
    """What Megatron's log line ends with."""
    busy = [seconds * _MILLI for seconds in interval.ranks.busy_s]
    ranks, which = list(range(len(busy))), "busy"
    if len(busy) > _NAMED_RANKS:
        ranks, which = sorted(ranks, key=busy.__getitem__)[:: len(busy) - 1], "least and most busy"
    named = ", ".join(f"{rank}: {busy[rank]:.1f}" for rank in ranks)
    idle = f"idle share: {interval.ranks.idle_share:.1%}"
    return f" tokens/s: {interval.tokens_per_s:.0f} | {idle} | {which} by rank (ms): {named} |"


def scalars(interval: Interval) -> dict[str, float]:
    """What TensorBoard and Weights & Biases are given, by name."""
    ranks = interval.ranks
    found = {"hexi/tokens-per-second": interval.tokens_per_s, "hexi/idle-share": ranks.idle_share}
    for rank, (busy, share) in enumerate(zip(ranks.busy_s, ranks.idle_shares, strict=True)):
        found |= {f"hexi-busy-seconds/rank-{rank}": busy, f"hexi-idle-share/rank-{rank}": share}
    return found


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training import get_args

    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        global _line_end
        session = active_session()
        if session is None:
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        iteration = call.arguments["iteration"]
        _untold.append((iteration, call.arguments["loss_dict"].get("lm loss")))
        if iteration % get_args().log_interval == 0 or call.arguments["is_first_iteration"]:
            _line_end = _tell(session)
        result = original(*args, **kwargs)
        _line_end = ""
        return result

    return training_log


def _tell(session: Session) -> str:
    from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    global _recorder
    numbers, losses = zip(*_untold, strict=True)
    _untold.clear()
    # Megatron waits for the device too before it logs.
    tokens = get_current_running_global_batch_size() * session.seq_length
    interval = gather_interval(numbers, losses, METER.take(), tokens, session)
    # On every rank, whatever its flags: making one is a collective.
    _recorder = _recorder or Recorder(session, get_args())
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
    """Tell of the iterations that were not told of yet: those that follow are another plan's.

    A collective of all ranks. What is told is missing in Megatron's log, not in the record.
    """
    if _untold:
        _tell(session)


def _with_line_end(original: Callable[[str], None]) -> Callable[[str], None]:
    @functools.wraps(original)
    def print_rank_last(message: str) -> None:
        global _line_end
        end, _line_end = _line_end, ""
        original(message + end)

    return print_rank_last


def _known(losses: Sequence[float]) -> float | None:
    """The loss that some rank knows; none where it is not finite."""
    return next((loss for loss in losses if math.isfinite(loss)), None)


PROGRESS_PATCHES = (
    Patch(
        target="megatron.training.training:training_log",
        why="tells what ranks did and waited, to the record and Megatron's writers",
        build=_telling,
        parameters=LOG_PARAMETERS,
    ),
    Patch(
        target="megatron.training.training:print_rank_last",
        why="adds tokens/s, idle share and ranks' times to Megatron's log line",
        build=_with_line_end,
        parameters=("message",),
    ),
)
