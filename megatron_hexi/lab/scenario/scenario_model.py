"""Data classes of scenario files: events on a cluster while a simulated job runs.

`at` and `until` count from the start of the scenario.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatron_hexi.yaml_schema import Strict

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = r"(\d+(?:\.\d+)?)([smhd])"
_SPELLING = re.compile(rf"{_PART}(?: ?{_PART})*")
#: Longest duration: a year; more is a typing error.
_LONGEST_S = 366 * 86400.0


def _seconds(text: Any) -> float:
    """Return the seconds of ``90s``, ``30m``, ``1h30m`` or ``7d``."""
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
    """GPUs with reduced speed for a time.

    Args:
        gpus: one GPU (``h100-0/3``), those of nodes (``h100-0``, ``h100-0..3``, ``h100``), or of a kind
            (``H100-SXM-80GB``).
        speed_factor: factor on their curves, at most 1.
        at: time at which it begins.
        until: time at which it ends; left out: the end of the scenario.
    """

    gpus: Text
    speed_factor: Factor
    at: Duration = 0.0
    until: Duration | None = None


@dataclass(frozen=True)
class Congested:
    """Links with reduced bandwidth for a time, both ways.

    Args:
        link: link from nodes to the network (``h100-0``, ``h100``), inside a node (``h100-0 inside``), or out
            of a group of a level (``rack 0``; ``rack h100-0`` where each node or GPU has its own).
        bandwidth_factor: factor on bandwidth, at most 1.
        at: time at which it begins.
        until: time at which it ends; left out: the end of the scenario.
    """

    link: Text
    bandwidth_factor: Factor
    at: Duration = 0.0
    until: Duration | None = None


@dataclass(frozen=True)
class NodeFailure:
    """Nodes that fail, and may come back.

    Args:
        nodes: one node (``h100-0``), several (``h100-0..3``), or all of an entry (``h100``).
        at: time from the start of the scenario at which the nodes fail: ``90m``, ``1h30m``.
        until: time from the start at which the nodes are back; left out: never.
    """

    nodes: Text
    at: Duration
    until: Duration | None = None


@dataclass(frozen=True)
class RandomThrottles:
    """GPUs that throttle independently.

    Args:
        mean_time_between: mean time of a GPU from the end of a throttle to the next; exponentially
            distributed.
        lasts: duration of each.
        speed_factor: factor on speed, at most 1.
    """

    mean_time_between: Span
    lasts: Span
    speed_factor: Factor


@dataclass(frozen=True)
class RandomCongestion:
    """Nodes whose links to the network are congested independently.

    Args:
        mean_time_between: mean time of a node from the end of a congestion to the next; exponentially
            distributed.
        lasts: duration of each.
        bandwidth_factor: factor on bandwidth, at most 1.
    """

    mean_time_between: Span
    lasts: Span
    bandwidth_factor: Factor


@dataclass(frozen=True)
class RandomFailures:
    """Nodes that fail independently.

    Args:
        mean_time_between: mean time of a node from its return to its next failure; exponentially distributed.
        repair: time from a failure until the node is back.
    """

    mean_time_between: Span
    repair: Span


@dataclass(frozen=True)
class Random:
    """Drawn events; the same seed draws the same events.

    Args:
        seed: seed of the draws.
        throttles: throttles of GPUs.
        congestion: congestion of nodes' links.
        failures: failures of nodes.
    """

    seed: Annotated[int, Field(strict=True, ge=0, le=2**63)] = 0
    throttles: RandomThrottles | None = None
    congestion: RandomCongestion | None = None
    failures: RandomFailures | None = None


@dataclass(frozen=True)
class Recovery:
    """Costs of a lost node.

    Args:
        checkpoint_every: iterations between checkpoints; iterations since the last one are repeated.
        restart: time from the loss, or a node's return, until the job trains again.
    """

    checkpoint_every: Iterations = 100
    restart: Duration = 300.0


@dataclass(frozen=True)
class Replanning:
    """Settings of re-planning.

    Args:
        interval: --hexi-replan-interval.
        threshold: --hexi-replan-threshold.
        reaction: iterations from the last examined one to the swap.
        swap: duration of a swap.
    """

    interval: Annotated[int, Field(strict=True, ge=2, le=10**6)] = 10
    threshold: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.03
    reaction: Iterations = 4
    swap: Duration = 0.1


@dataclass(frozen=True)
class Scenario(Strict):  # and so the classes in it, to which pydantic hands its configuration on
    """Events of a cluster while a job runs on it, and the job's costs.

    Args:
        lasts: duration of the scenario.
        throttled: slower GPUs; where several hold at once, their factors multiply.
        congested: slower links, likewise.
        lost: lost nodes.
        random: drawn events.
        recovery: costs of a lost node.
        replanning: settings of the policy that re-plans.
    """

    lasts: Span
    throttled: tuple[Throttled, ...] = ()
    congested: tuple[Congested, ...] = ()
    lost: tuple[NodeFailure, ...] = ()
    random: Random = Random()
    recovery: Recovery = Recovery()
    replanning: Replanning = Replanning()
