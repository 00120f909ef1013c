"""Failures of every kind at random moments of a job; the same seed draws the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from benchmarks.goodput.job import NODES

#: A rank is killed; a node with its agent, which comes back; a rank is stopped; a node and a rank of another.
FailureKind = Literal["rank", "node", "stop", "two"]
KINDS: tuple[FailureKind, ...] = ("rank", "node", "stop", "two")
#: A failure comes at most this part of the distance earlier or later than the distance says.
_SPREAD = 1 / 3


@dataclass(frozen=True)
class Failure:
    """A failure.

    Args:
        kind: kind of failure.
        iteration: iteration after whose first end it comes.
        part: part of an iteration that passes until then, from 0 to 1.
        nodes: the node that it hits, and the second one of ``two``.
    """

    kind: FailureKind
    iteration: int
    part: float
    nodes: tuple[str, ...]


def draw_failures(iterations: int, every: int, seed: int) -> list[Failure]:
    """Return a failure each `every` iterations: each kind once before any comes again.

    Args:
        iterations: length of the job.
        every: mean distance of failures, iterations.
        seed: seed of the draw.
    """
    draw = random.Random(seed)
    spread = int(every * _SPREAD)
    failures: list[Failure] = []
    kinds: list[FailureKind] = []
    for middle in range(every, iterations - spread, every):
        kinds = kinds or draw.sample(KINDS, len(KINDS))
        kind = kinds.pop()
        nodes = draw.sample(sorted(NODES), 2 if kind == "two" else 1)
        failures.append(Failure(kind, middle + draw.randint(-spread, spread), draw.random(), tuple(nodes)))
    return failures
