"""A run compared with its prediction: plain values for the page and ``hexi report --json``, and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from megatron_hexi.cost import IterationCost
from megatron_hexi.cost.memory import GIB
from megatron_hexi.errors import HexiError
from megatron_hexi.models.job import EXPERT_IMBALANCE
from megatron_hexi.plan import Plan, plan_digest
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.units import job_ranks, unit_rows
from megatron_hexi.record import Interval, Leg, Record, Round, Start
from megatron_hexi.report.tables import Report, make_table
from megatron_hexi.spelling import first_few, spell_seconds

#: Shown characters of a digest, as in tables of plans.
_DIGEST = 12
#: Last rounds of an elastic job that are listed.
_LISTED_ROUNDS = 8
#: Loads of experts that vary by so much more or less than assumed call for another plan: 5 % more rows on a
#: rank with four experts.
_NEAR_IMBALANCE = 0.05


#: Parts of a rank's step: work, and waits by kind.
_SECONDS = ("busy_s", "attention_s", "gradients_s", "pipeline_s", "experts_s")


@dataclass(frozen=True)
class RankRun:
    """A rank: its part of the plan, and its mean iteration; predictions are ``None`` without any.

    Args:
        idle_share: part of its step spent waiting, from 0 to 1.
        predicted_wait_s: predicted seconds of exposed communication, and of waiting for slower ranks.
    """

    rank: int
    member: int
    stage: int
    device: str
    tokens: int
    heads: Range
    busy_s: float
    attention_s: float
    gradients_s: float
    pipeline_s: float
    experts_s: float
    idle_share: float
    peak_gib: float
    predicted_busy_s: float | None = None
    predicted_wait_s: float | None = None
    predicted_gib: float | None = None
    usable_gib: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds of all waiting."""
        return self.attention_s + self.gradients_s + self.pipeline_s + self.experts_s


@dataclass(frozen=True)
class RunSpeed:
    """The mean speed of iterations.

    Args:
        idle_share: part of all ranks' time spent waiting, from 0 to 1.
        tokens_per_s_per_gpu: mean of a GPU; ``None``, as are the next fields, if the cluster is unknown.
    """

    iteration_s: float
    tokens_per_s: float
    idle_share: float | None
    tokens_per_s_per_gpu: float | None = None
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None


@dataclass(frozen=True)
class Run:
    """A run with its measurements and prediction.

    Args:
        losses: loss of each iteration; ``None`` where it was not finite.
        seconds: seconds of each iteration.
        timed: number of iterations over which `measured` and `ranks` have means.
        assumed_imbalance: imbalance of experts' loads that the plan was made for; ``None`` without experts.
    """

    plan_digest: str
    started: str
    platform: str
    starts: int
    iterations: tuple[int, ...]
    losses: tuple[float | None, ...]
    seconds: tuple[float, ...]
    timed: int
    measured: RunSpeed
    predicted: RunSpeed | None
    ranks: tuple[RankRun, ...]
    notes: tuple[str, ...]
    expert_imbalance: float | None = None
    assumed_imbalance: float | None = None


def last_start(record: Record, plan: Plan) -> Start:
    """Return the last start of the job under a plan."""
    digest = plan_digest(plan)
    starts = [leg.start for leg in record.legs if leg.start.digest == digest]
    if not starts:
        recorded = ", ".join(dict.fromkeys(leg.start.digest[:_DIGEST] for leg in record.legs))
        raise HexiError(
            f"{record.path}: was recorded under the plan {recorded}, not under {digest[:_DIGEST]}; give that "
            "run's plan"
        )
    ranks = job_ranks(plan, starts[-1].pipeline_parallel)
    if len(starts[-1].devices) != ranks:
        raise HexiError(
            f"{record.path}: the job had {len(starts[-1].devices)} ranks, but the plan makes it {ranks}; is "
            "the record damaged?"
        )
    return starts[-1]


def describe_run(record: Record, plan: Plan, cost: IterationCost | None = None) -> Run:
    """Return the measurements of a recorded run, and the prediction for its plan.

    Args:
        cost: the cost model's prediction; ``None``: the plan's own estimate is used.
    """
    start = last_start(record, plan)
    same = [leg for leg in record.legs if _settings(leg.start) == _settings(start)]
    timed = _timed(same)
    curve = {
        iteration: (loss, seconds)
        for leg in record.legs
        for interval in leg.intervals
        for iteration, loss, seconds in zip(
            interval.iterations, interval.losses, interval.seconds, strict=True
        )
    }
    iterations = tuple(sorted(curve))
    loads = _expert_imbalance(timed)
    assumed = EXPERT_IMBALANCE if plan.job.expert_imbalance is None else plan.job.expert_imbalance
    return Run(
        plan_digest=start.digest,
        started=record.legs[0].start.started,
        platform=start.platform,
        starts=sum(leg.start.swapped_at is None for leg in record.legs),
        iterations=iterations,
        losses=tuple(curve[iteration][0] for iteration in iterations),
        seconds=tuple(curve[iteration][1] for iteration in iterations),
        timed=sum(len(interval.iterations) for interval in timed),
        measured=_measured(timed, cost),
        predicted=_predicted(plan, cost),
        ranks=_ranks(plan, start, timed, cost),
        notes=(*_notes(record, same, timed), *_tensor_parallel_note(plan), *_imbalance_note(loads, assumed)),
        expert_imbalance=loads,
        assumed_imbalance=None if loads is None else assumed,
    )


def _timed(legs: Sequence[Leg]) -> list[Interval]:
    """Return the intervals without each start's first, in which kernels and memory warm up."""
    warm = [interval for leg in legs for interval in leg.intervals[1:]]
    return warm or [interval for leg in legs for interval in leg.intervals]


def _measured(intervals: Sequence[Interval], cost: IterationCost | None) -> RunSpeed:
    seconds = [value for interval in intervals for value in interval.seconds]
    tokens = sum(interval.tokens * len(interval.iterations) for interval in intervals)
    by_rank = [_summed(intervals, rank) for rank in range(len(intervals[0].ranks.step_s))]
    stepped = sum(sum(seconds.values()) for seconds in by_rank)
    waited = stepped - sum(seconds["busy_s"] for seconds in by_rank)
    rate = tokens / (sum(seconds) or 1.0)
    return RunSpeed(
        iteration_s=sum(seconds) / len(seconds),
        tokens_per_s=rate,
        idle_share=waited / (stepped or 1.0),
        **({} if cost is None else cost.throughput.at(rate).facts),
    )


def _summed(intervals: Sequence[Interval], rank: int) -> dict[str, float]:
    """Return the seconds of all iterations of a rank by their kind, as `RankRun` names them."""
    return {
        kind: sum(getattr(interval.ranks, kind)[rank] * len(interval.iterations) for interval in intervals)
        for kind in _SECONDS
    }


def _predicted(plan: Plan, cost: IterationCost | None) -> RunSpeed | None:
    if cost is not None:
        waits = sum(rank.communication_s + rank.idle_s for rank in cost.ranks)
        share = waits / (len(cost.ranks) * cost.iteration_s)
        return RunSpeed(cost.iteration_s, cost.tokens_per_s, share, **cost.throughput.facts)
    estimate = plan.estimate
    if estimate is None or estimate.iteration_s is None or estimate.tokens_per_s is None:
        return None
    return RunSpeed(estimate.iteration_s, estimate.tokens_per_s, None)


def _ranks(
    plan: Plan, start: Start, intervals: Sequence[Interval], cost: IterationCost | None
) -> tuple[RankRun, ...]:
    units = unit_rows(plan, stages=start.pipeline_parallel)
    unit_of = {rank: (number % plan.units, unit) for number, unit in enumerate(units) for rank in unit.ranks}
    count = sum(len(interval.iterations) for interval in intervals)
    rank_runs = []
    for rank, device in enumerate(start.devices):
        number, unit = unit_of[rank]
        seconds = {kind: total / count for kind, total in _summed(intervals, rank).items()}
        stepped = sum(seconds.values())
        rank_cost = None if cost is None else cost.ranks[rank]
        rank_runs.append(
            RankRun(
                rank=rank,
                member=number,
                stage=unit.stage,
                device=device if rank_cost is None else f"{rank_cost.device} ({rank_cost.name})",
                tokens=unit.tokens,
                heads=unit.heads,
                idle_share=(stepped - seconds["busy_s"]) / (stepped or 1.0),
                peak_gib=max(interval.ranks.peak_bytes[rank] for interval in intervals) / GIB,
                predicted_busy_s=None if rank_cost is None else rank_cost.compute_s,
                predicted_wait_s=None if rank_cost is None else rank_cost.communication_s + rank_cost.idle_s,
                predicted_gib=rank_cost.memory_gib
                if rank_cost
                else _estimated_gib(plan, rank, len(start.devices)),
                usable_gib=None if rank_cost is None else rank_cost.usable_gib,
                **seconds,
            )
        )
    return tuple(rank_runs)


def _estimated_gib(plan: Plan, rank: int, ranks: int) -> float | None:
    known = plan.estimate.memory_gib if plan.estimate else None
    return known[rank] if known and len(known) == ranks else None


def _settings(start: Start) -> Start:
    """Return a start without its time, swap and round."""
    return dataclasses.replace(start, started="", swapped_at=None, round=None)


def _notes(record: Record, same: Sequence[Leg], timed: Sequence[Interval]) -> tuple[str, ...]:
    notes = []
    starts = sum(leg.start.swapped_at is None for leg in record.legs)
    swaps = [str(leg.start.swapped_at) for leg in record.legs if leg.start.swapped_at is not None]
    if swaps:
        notes.append(
            f"the plan was swapped {len(swaps)} times while the job ran, before iteration " + first_few(swaps)
        )
    rounds = [leg.start.round for leg in record.legs if leg.start.swapped_at is None and leg.start.round]
    notes += map(_round_note, [r for r in rounds if r.number > 1][-_LISTED_ROUNDS:])
    if starts > 1:
        notes.append(
            f"the job was started {starts} times; of an iteration that was repeated after a "
            "restart the last is shown"
        )
    different = len(record.legs) - len(same)
    if different:
        notes.append(
            f"{different} of these starts {'and swaps ' if swaps else ''}had another plan or other settings: "
            "their losses are in the curve, their times are in no mean"
        )
    iterations = [number for interval in timed for number in interval.iterations]
    slow = max(value for interval in timed for value in interval.seconds)
    notes.append(
        f"means are of {len(iterations)} iterations from {min(iterations)} to {max(iterations)}, the slowest "
        f"took {spell_seconds(slow)} s"
        + ("" if len(same[0].intervals) > 1 else "; the first one is among them, in which all is slower")
    )
    return tuple(notes)


def _round_note(ended: Round) -> str:
    """Return a note on a round: the loss of nodes, or their return."""
    absent = f"without {', '.join(ended.without)}" if ended.without else "with all nodes"
    return (
        f"round {ended.number} {absent}: from iteration {ended.resumed}"
        f"{' in memory' if ended.in_memory else ''}, {ended.undone} iterations done again; "
        f"goodput {ended.goodput:.0%} by then"
    )


def _expert_imbalance(intervals: Sequence[Interval]) -> float | None:
    """Return the mean expert imbalance, weighted by each interval's iterations; ``None`` if unrecorded."""
    known = [
        (interval.expert_imbalance, len(interval.iterations))
        for interval in intervals
        if interval.expert_imbalance is not None
    ]
    return sum(loads * count for loads, count in known) / sum(count for _, count in known) if known else None


def _imbalance_note(loads: float | None, assumed: float) -> tuple[str, ...]:
    """Return a note on measured loads of experts, with what to type where they are not the assumed ones."""
    if loads is None:
        return ()
    remedy = ""
    if abs(loads - assumed) > _NEAR_IMBALANCE:
        remedy = f"; plan again with hexi plan --expert-imbalance {loads:.2f}"
    said = "loads of experts vary by {:.2f} (standard deviation over mean), planned for {:.2f}"
    return (said.format(loads, assumed) + remedy,)


def _tensor_parallel_note(plan: Plan) -> tuple[str, ...]:
    if all(len(member.ranks) == 1 for member in plan.members):
        return ()
    return ("sums of tensor parallelism are measured as busy, and predicted as waiting",)


_CAPTION = "seconds of the mean iteration; waiting includes transfers that no work hides; GiB: the most"


def run_report(run: Run) -> Report:
    """Return the run in a line, and each rank in a row."""
    return Report(Text(_headline(run)), run_table(run), *(Text(f"note: {note}") for note in run.notes))


def run_table(run: Run) -> Table:
    """Return a table of each rank's time and memory, with predictions where there are any."""
    predicted = any(rank.predicted_gib is not None for rank in run.ranks)
    beside = ["predicted"] * predicted
    columns = ("rank", "device", "busy", *beside, "waiting", *beside, "idle share", "GiB", *beside)
    table = make_table(columns, ("device",), _CAPTION)
    for rank in run.ranks:
        pairs = (
            (spell_seconds(rank.busy_s), spell_seconds(rank.predicted_busy_s)),
            (spell_seconds(rank.waited_s), spell_seconds(rank.predicted_wait_s)),
            (f"{rank.peak_gib:.2f}", "–" if rank.predicted_gib is None else f"{rank.predicted_gib:.2f}"),
        )
        busy, waiting, memory = (pair if predicted else pair[:1] for pair in pairs)
        table.add_row(str(rank.rank), Text(rank.device), *busy, *waiting, f"{rank.idle_share:.1%}", *memory)
    return table


def _headline(run: Run) -> str:
    measured, predicted = run.measured, run.predicted
    words = [
        (f"{spell_seconds(measured.iteration_s)} s each", predicted and spell_seconds(predicted.iteration_s)),
        (f"{measured.tokens_per_s:,.0f} tokens/s", predicted and f"{predicted.tokens_per_s:,.0f}"),
        *_throughput_words(measured, predicted),
        (
            f"idle share {measured.idle_share:.1%}",
            f"{predicted.idle_share:.1%}" if predicted and predicted.idle_share is not None else None,
        ),
    ]
    spelt = [measured_text + (f" (predicted {beside})" if beside else "") for measured_text, beside in words]
    timed = "" if run.timed == len(run.iterations) else f", of which {run.timed} are timed"
    return f"{len(run.iterations)} iterations{timed}: {', '.join(spelt)}"


def _throughput_words(measured: RunSpeed, predicted: RunSpeed | None) -> Iterator[tuple[str, str | None]]:
    """Yield tokens/s and TFLOP/s per GPU, and MFU, as far as known: measured, and predicted or ``None``."""
    spells = {
        "tokens_per_s_per_gpu": "{:,.0f} tokens/s per GPU",
        "model_tflops_per_gpu": "{:,.3g} model TFLOP/s per GPU",
        "mfu": "MFU {:.1%}",
    }
    for name, spell in spells.items():
        value, beside = getattr(measured, name), predicted and getattr(predicted, name)
        if value is not None:
            yield spell.format(value), None if beside is None else spell.format(beside)
