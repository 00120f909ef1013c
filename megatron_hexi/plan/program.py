"""The program of a pass of attention: a rank's posts, computations and waits, in their order.

This is the one place that says so. The runtime carries it out with tensors (`runtime.passes`), the cost model
with the clocks of all units (`cost.overlap`), the simulator event by event (`lab.simulator.unit_program`),
and tests by NCCL's rules. It says nothing of sizes: those stand in the split tables (`plan.schedule`).

    post the ways in; wait for the first; post the keys of the first `window` steps
    own block: of one half of the heads after the other, each when its way in has arrived
    each step: post the keys of the step `window` later; part by part wait for its keys, compute its blocks
    ways out: each posted when its half of the heads is done; wait for all of them

Backward, each part also posts its gradients when its blocks are computed, and a step ends with the wait for
those of the step `window` before. The own block is then cut in two: one half comes before the steps and hides
their first keys, the other after them and hides their last gradients, and the first way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

#: An all-to-all to the heads' layout, keys and values to their users, gradients of these to their owners, an
#: all-to-all back to the tokens' layout.
Cargo = Literal["in", "keys", "gradients", "out"]


class Batch(NamedTuple):
    """Messages that travel together.

    Args:
        cargo: the kind of messages.
        step: step of the exchange, from 0; of an all-to-all, the half of the heads.
        part: part of the step, from 0.
    """

    cargo: Cargo
    step: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Post:
    """Start a batch, behind those that were posted before."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until a batch has arrived and its sends are complete."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class OwnBlock:
    """Compute the own group's block for one half of the heads, or both.

    Args:
        first: first half, 0 or 1.
        stop: half after the last; 0 and 2: the whole block at once.
    """

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class FarBlocks:
    """Compute the blocks of a part of a step.

    Args:
        step: step of the exchange, from 0.
        part: part of the step, from 0.
        piece: ``None``: all of it; where the half of the heads that leaves first ends in it, 0: up to there,
            1: the rest.
    """

    step: int
    part: int
    piece: int | None = None


Operation = Post | Wait | OwnBlock | FarBlocks


@lru_cache(maxsize=128)  # a search asks for few shapes, over and over
def attention_program(
    backward: bool, parts: tuple[int, ...], window: int, halves: int, turn: int
) -> tuple[Operation, ...]:
    """Return the operations of a pass of attention.

    Args:
        backward: whether it is the backward pass.
        parts: number of parts of each step of the exchange.
        window: steps whose keys are under way ahead of the step in use.
        halves: number of all-to-alls in which query heads travel each way, 1 or 2.
        turn: part of the last step in which, forward, the half of the heads that leaves first ends.
    """
    return tuple(_pass(backward, parts, window, halves, turn))


def _pass(backward: bool, parts: Sequence[int], window: int, halves: int, turn: int) -> Iterator[Operation]:
    steps = len(parts)
    keys, gradients = (
        [[Batch(cargo, step, part) for part in range(count)] for step, count in enumerate(parts)]
        for cargo in ("keys", "gradients")
    )
    first_out = Post(Batch("out", 0))
    yield from (Post(Batch("in", half)) for half in range(halves))
    yield Wait(Batch("in", 0))
    yield from _each(Post, keys[:window])
    has_rest = backward and steps > 0
    yield OwnBlock(0, 1 if has_rest or halves > 1 else 2)
    if halves > 1:
        if not steps:
            yield first_out
        yield Wait(Batch("in", 1))
        if not has_rest:
            yield OwnBlock(1, 2)
    for step, batches in enumerate(keys):
        yield from _each(Post, keys[step + window : step + window + 1])
        for batch in batches:
            yield Wait(batch)
            if halves > 1 and not backward and (step, batch.part) == (steps - 1, turn):
                yield FarBlocks(step, batch.part, 0)
                yield first_out
                yield FarBlocks(step, batch.part, 1)
            else:
                yield FarBlocks(step, batch.part)
            if backward:
                yield Post(gradients[step][batch.part])
        if backward and window <= step < steps - 1:
            yield from _each(Wait, gradients[step - window : step - window + 1])
    if has_rest:
        if halves > 1:
            yield first_out
        yield OwnBlock(1, 2)
        yield from _each(Wait, gradients[max(0, steps - 1 - window) :])
    yield Post(Batch("out", halves - 1))
    yield from (Wait(Batch("out", half)) for half in range(halves))


def _each(operation: type[Post | Wait], steps: Sequence[Sequence[Batch]]) -> Iterator[Operation]:
    return (operation(batch) for step in steps for batch in step)
