"""What a scenario file says, as frozen data. Times are since the start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(extra="forbid")

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = r"(\d+(?:\.\d+)?)([smhd])"
_SPELLING = re.compile(rf"{_PART}(?: ?{_PART})*")
#: A year; longer is a typing error.
_LONGEST_S = 366 * 86400.0


def _seconds(text: Any) -> float:
    """``90s``, ``30m``, ``1h30m`` or ``7d`` in seconds."""
    if isinstance(text, str) and len(text) <= 40 and _SPELLING.fullmatch(text):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text))
        if seconds <= _LONGEST_S:
            return seconds
    raise PydanticCustomError("duration", "no duration")


Duration = Annotated[
    float, BeforeValidator(_seconds), WithJsonSchema({"type": "string", "format": "duration"})
]
#: Above zero.
Span = Annotated[Duration, Field(gt=0)]
Factor = Annotated[float, Field(strict=True, gt=0, le=1)]
Text = Annotated[str, Field(min_length=1, max_length=200)]
Iterations = Annotated[int, Field(strict=True, ge=1, le=10**6)]


@dataclass(frozen=True)
class Throttled:
    """GPUs at a part of their speed for a time.

    Args:
        gpus: one GPU (``h100-0/3``), those of nodes (``h100-0``, ``h100-0..3``, ``h100``), or of a kind
            (``H100-SXM-80GB``).
        speed: factor on their curves, at most 1.
        at: when it begins.
        until: when it ends; with the scenario if not given.
    """

    gpus: Text
    speed: Factor
    at: Duration = 0.0
    until: Duration | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Congested:
    """Links at a part of their bandwidth for a time, both ways.

    Args:
        link: from nodes to the network (``h100-0``, ``h100``), inside a node (``h100-0 inside``), or out of a
            group of a level (``rack 0``; ``rack h100-0`` where each node or GPU has its own).
        bandwidth: factor, at most 1.
        at: when it begins.
        until: when it ends; with the scenario if not given.
    """

    link: Text
    bandwidth: Factor
    at: Duration = 0.0
    until: Duration | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Lost:
    """Nodes that fail, and come back.

    Args:
        nodes: ``h100-0``, ``h100-0..3`` or ``h100``.
        at: when they fail.
        until: when they are back; default never.
    """

    nodes: Text
    at: Duration
    until: Duration | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class RandomThrottles:
    """GPUs that throttle, each by itself.

    Args:
        mean_time_between: of one GPU, from the end of a throttle to the next; exponentially distributed.
        lasts: duration of each.
        speed: factor, at most 1.
    """

    mean_time_between: Span
    lasts: Span
    speed: Factor

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class RandomCongestion:
    """Nodes whose links to the network are congested, each by itself.

    Args:
        mean_time_between: of one node, from the end of a congestion to the next; exponentially distributed.
        lasts: duration of each.
        bandwidth: factor, at most 1.
    """

    mean_time_between: Span
    lasts: Span
    bandwidth: Factor

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class RandomFailures:
    """Nodes that fail, each by itself.

    Args:
        mean_time_between: of one node, from its return to its next failure; exponentially distributed.
        repair: how long it is away.
    """

    mean_time_between: Span
    repair: Span

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Random:
    """Events that are drawn; the same seed draws the same.

    Args:
        seed: of the draws.
        throttles: of GPUs.
        congestion: of nodes' links.
        failures: of nodes.
    """

    seed: Annotated[int, Field(strict=True, ge=0, le=2**63)] = 0
    throttles: RandomThrottles | None = None
    congestion: RandomCongestion | None = None
    failures: RandomFailures | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Recovery:
    """What a lost node costs a job.

    Args:
        checkpoint_every: iterations between checkpoints; those since the last one are done again.
        restart: from the loss, or from a node's return, until the job trains again.
    """

    checkpoint_every: Iterations = 100
    restart: Duration = 300.0

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Replanning:
    """How the job is re-planned.

    Args:
        interval: as --hexi-replan-interval.
        threshold: as --hexi-replan-threshold.
        reaction: iterations from the last one that was looked at to the swap.
        swap: what a swap takes.
    """

    interval: Annotated[int, Field(strict=True, ge=2, le=10**6)] = 10
    threshold: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.03
    reaction: Iterations = 4
    swap: Duration = 0.1

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Scenario:
    """What happens to a cluster while a job runs on it.

    Args:
        lasts: its duration.
        throttled: slower GPUs; where several hold at once, their factors multiply.
        congested: slower links, likewise.
        lost: lost nodes.
        random: events that are drawn.
        recovery: costs of a lost node.
        replanning: of the policy that re-plans.
    """

    lasts: Span
    throttled: tuple[Throttled, ...] = ()
    congested: tuple[Congested, ...] = ()
    lost: tuple[Lost, ...] = ()
    random: Random = Random()
    recovery: Recovery = Recovery()
    replanning: Replanning = Replanning()

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
