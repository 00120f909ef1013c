"""The record of a run: each start of the job, and its figures whenever Megatron logged.

In its file each is a JSON line, appended whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

from megatron_hexi.errors import HexiError
from megatron_hexi.plan.terms import Count, Positive, Real
from megatron_hexi.text_file import append_line, check_output, open_private, read_text
from megatron_hexi.yaml_file import Place, spell_place
from megatron_hexi.yaml_schema import Label, Strict, parse, short

FORMAT_VERSION: Final = 1

#: A loss; ``None`` where it was not finite.
Loss = Annotated[float, Field(allow_inf_nan=False)] | None


@dataclass(frozen=True)
class Round(Strict):
    """A start of the ranks under `megatron_hexi.elastic`.

    Args:
        without: nodes of the cluster file that are absent.
        resumed: iteration that it resumes from; 0 at the beginning.
        goodput: seconds of iterations that no loss undid, of all seconds since the job began, by then.
    """

    number: Positive
    without: tuple[Label, ...]
    resumed: Count
    in_memory: bool
    undone: Count
    goodput: Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Start(Strict):
    """The record's entry for a start of the job, a restart, or a swap to another plan.

    Args:
        started: time of the start, ISO 8601 with the zone.
        swapped_at: the first iteration under this plan, which took another's place while the job ran
            (``--hexi-replan-interval``); ``None``: the job was started.
        recompute: ``none``, ``selective``, ``full``, or modules with commas.
        platform: ``cuda`` or ``cpu``.
        round: round of an elastic job; ``None`` in any other job.
    """

    started: Label
    digest: Label
    platform: Literal["cuda", "cpu"]
    devices: tuple[Label, ...]
    micro_batch_size: Positive
    global_batch_size: Positive
    pipeline_parallel: Positive
    recompute: Label
    precision: Label
    distributed_optimizer: bool
    overlap_gradients: bool
    sequence_parallel: bool
    swapped_at: Positive | None = None
    round: Round | None = None
    virtual_stages: Positive = 1
    version: Literal[1] = FORMAT_VERSION


@dataclass(frozen=True)
class RankTimes(Strict):
    """Mean times of an iteration over an interval, in seconds, by rank of the job.

    Args:
        attention_s: part of the step spent waiting in attention for keys, values, gradients and all-to-alls.
        gradients_s: part spent waiting until the weights' gradients are summed and weights are gathered.
        pipeline_s: part spent waiting for other pipeline stages.
        peak_bytes: the most memory so far, bytes: allocated on the GPU; on the CPU, resident in the process.
        experts_s: part spent waiting for the exchange of tokens with experts on other ranks; zeros in records
            that do not have it.
    """

    step_s: tuple[Real, ...]
    attention_s: tuple[Real, ...]
    gradients_s: tuple[Real, ...]
    pipeline_s: tuple[Real, ...]
    peak_bytes: tuple[Count, ...]
    experts_s: tuple[Real, ...] = ()

    def __post_init__(self) -> None:
        if not self.experts_s:
            object.__setattr__(self, "experts_s", (0.0,) * len(self.step_s))

    @property
    def waited_s(self) -> tuple[float, ...]:
        """Seconds that each rank waits, for any reason."""
        waits = zip(self.attention_s, self.gradients_s, self.pipeline_s, self.experts_s, strict=True)
        return tuple(sum(kinds) for kinds in waits)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of each rank's step without waiting."""
        # Rounding must not make a rank that only waits work less than nothing.
        return tuple(max(0.0, step - wait) for step, wait in zip(self.step_s, self.waited_s, strict=True))

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """Share of each rank's step that it waits, from 0 to 1."""
        pairs = zip(self.waited_s, self.step_s, strict=True)
        return tuple(wait / step if step else 0.0 for wait, step in pairs)

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time in which they wait."""
        return sum(self.waited_s) / (sum(self.step_s) or 1.0)


@dataclass(frozen=True)
class Interval(Strict):
    """The iterations since Megatron last logged.

    Args:
        iterations: their numbers, ascending, from 1.
        seconds: seconds of each iteration's training step, on the rank where it took longest.
        losses: loss of each iteration, a mean over its tokens.
        expert_imbalance: standard deviation over mean of the rows of an expert, a mean over these iterations
            and layers; ``None`` without experts.
        tokens: tokens of one iteration, over all replicas.
    """

    iterations: Annotated[tuple[Positive, ...], Field(min_length=1)]
    seconds: tuple[Real, ...]
    losses: tuple[Loss, ...]
    tokens: Positive
    ranks: RankTimes
    expert_imbalance: Real | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of these iterations over their seconds."""
        return self.tokens * len(self.seconds) / (sum(self.seconds) or 1.0)


@dataclass(frozen=True)
class Leg:
    """A start of the job and its intervals up to the next start."""

    start: Start
    intervals: tuple[Interval, ...]


@dataclass(frozen=True)
class Record:
    """A whole record: at least one start with at least one interval."""

    path: Path
    legs: tuple[Leg, ...]


_START = TypeAdapter(Start)
_INTERVAL = TypeAdapter(Interval)

#: A line is a mapping with one of these keys.
_KINDS = ("start", "interval")

#: What the first line of a record begins with.
_BEGIN = b'{"start": {'

#: Seconds are kept to the microsecond: a line of a large job stays short.
_DIGITS = 6

#: A thousand ranks, logged ten thousand times.
_MAX_BYTES = 2**30


def open_record(path: Path) -> None:
    """Prepare a record for appending: create the file, or remove an incomplete last line of it.

    The last line is incomplete if the job was killed while writing it. A new file is readable by its owner
    only.

    Raises:
        HexiError: the file is no record, or cannot be written.
    """
    check_output(path)
    try:
        with open(path, "a+b", opener=open_private) as file:
            file.seek(0)
            begin = file.read(len(_BEGIN))
            if not _BEGIN.startswith(begin):
                raise HexiError(
                    f"{path}: begins with {short(begin[:20])}, no record; give --hexi-record another file"
                )
            text = begin + file.read()
            file.truncate(text.rfind(b"\n") + 1)
    except OSError as problem:
        raise HexiError(f"{path}: cannot be written ({problem.strerror}); give another file") from None


def append_to_record(path: Path, entry: Start | Interval) -> None:
    """Append a line, whole or not at all.

    Raises:
        HexiError: it cannot be written.
    """
    kind = "start" if isinstance(entry, Start) else "interval"
    append_line(path, json.dumps({kind: _rounded(dataclasses.asdict(entry))}, allow_nan=False))


def read_record(path: Path) -> Record:
    """Read a record and check it.

    Raises:
        HexiError: the file cannot be read, is no record, or ends too early; with the line.
    """
    remedy = "give the file of the run's --hexi-record"
    text = read_text(path, _MAX_BYTES, remedy=remedy, content_remedy=remedy)
    *lines, rest = text.split("\n")
    legs: list[tuple[Start, list[Interval]]] = []
    for number, line in enumerate(lines, start=1):
        entry = _entry(path, number, line)
        if isinstance(entry, Start):
            legs.append((entry, []))
        elif not legs:
            raise HexiError(f"{path}:{number}: no start of a run before this line; give the whole file")
        else:
            _check_lengths(path, number, entry, len(legs[-1][0].devices))
            legs[-1][1].append(entry)
    if rest:
        raise HexiError(
            f"{path}:{len(lines) + 1}: cut off in the middle of a line; delete it (the job does so when it "
            "goes on)"
        )
    recorded = tuple(Leg(start, tuple(intervals)) for start, intervals in legs if intervals)
    if not recorded:
        raise HexiError(
            f"{path}: holds no iteration yet; let the run go on until Megatron logs one (--log-interval)"
        )
    return Record(path, recorded)


def _entry(path: Path, number: int, line: str) -> Start | Interval:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in _KINDS:
        raise HexiError(
            f"{path}:{number}: {short(line)} is not a line of a run's record; give what --hexi-record wrote"
        )
    ((kind, value),) = data.items()

    def where(place: Place) -> str:
        return f"{path}:{number}: {spell_place((kind, *place))}"

    if kind == "interval":
        return parse(_INTERVAL, value, where, HexiError)
    if isinstance(value, dict) and value.get("version") != FORMAT_VERSION:
        raise HexiError(
            f"{where(('version',))} is {short(value.get('version'))}, this megatron-hexi reads "
            f"{FORMAT_VERSION}; use the one that wrote it"
        )
    return parse(_START, value, where, HexiError)


def _check_lengths(path: Path, number: int, interval: Interval, ranks: int) -> None:
    iterations = len(interval.iterations)
    lists: dict[str, tuple[int, int]] = {
        name: (len(getattr(interval, name)), iterations) for name in ("seconds", "losses")
    }
    for field in dataclasses.fields(RankTimes):
        lists[f"ranks.{field.name}"] = len(getattr(interval.ranks, field.name)), ranks
    for name, (found, wanted) in lists.items():
        if found != wanted:
            raise HexiError(
                f"{path}:{number}: interval.{name} has {found} values, there should be {wanted}; is the file "
                "damaged?"
            )


def _rounded(value: Any) -> Any:
    """Return a value of the record with its floats rounded to `_DIGITS` digits, but losses as they are."""
    if isinstance(value, dict):
        return {key: item if key == "losses" else _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return round(value, _DIGITS) if isinstance(value, float) else value
