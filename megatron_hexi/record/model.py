"""The record of a run as plain data: each start of the job, and its figures whenever Megatron logged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from megatron_hexi.plan.terms import Count, Positive, Real
from megatron_hexi.yaml_schema import Label

FORMAT_VERSION: Final = 1

_STRICT = ConfigDict(extra="forbid")

#: A loss; ``None`` where it was not finite.
Loss = Annotated[float, Field(allow_inf_nan=False)] | None


@dataclass(frozen=True)
class Round:
    """A start of the ranks under `megatron_hexi.elastic`.

    Args:
        number: number of the round, from 1.
        without: nodes of the cluster file that are absent.
        resumed: iteration that it resumes from; 0 at the beginning.
        in_memory: whether its state came from copies in memory.
        goodput: seconds of iterations that no loss undid, of all seconds since the job began, by then.
    """

    number: Positive
    without: tuple[Label, ...]
    resumed: Count
    in_memory: bool
    undone: Count
    goodput: Annotated[float, Field(ge=0, le=1)]

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True, kw_only=True)
class Start:
    """The record's entry for a start of the job, a restart, or a swap to another plan.

    Args:
        started: time of the start, ISO 8601 with the zone.
        digest: digest of the plan (``plan_digest``).
        platform: ``cuda`` or ``cpu``.
        micro_batch_size: Megatron's argument; so are the following.
        virtual_stages: chunks of each stage.
        recompute: ``none``, ``selective`` or ``full``.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        distributed_optimizer: whether the optimizer's state is cut over ranks.
        swapped_at: the first iteration under this plan, which took another's place while the job ran
            (``--hexi-replan-interval``); ``None``: the job was started.
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

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class RankTimes:
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

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

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
class Interval:
    """The iterations since Megatron last logged.

    Args:
        iterations: their numbers, ascending, from 1.
        seconds: seconds of each iteration's training step, on the rank where it took longest.
        losses: loss of each iteration, a mean over its tokens.
        tokens: tokens of one iteration, over all replicas.
        expert_imbalance: standard deviation over mean of the rows of an expert, a mean over these iterations
            and layers; ``None`` without experts.
    """

    iterations: Annotated[tuple[Positive, ...], Field(min_length=1)]
    seconds: tuple[Real, ...]
    losses: tuple[Loss, ...]
    tokens: Positive
    ranks: RankTimes
    expert_imbalance: Real | None = None

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

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
    """A whole record: at least one start with at least one interval.

    Args:
        legs: part of the record of each start, in the order of time.
    """

    path: Path
    legs: tuple[Leg, ...]
