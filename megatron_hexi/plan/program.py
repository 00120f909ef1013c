"""The program of attention: the order in which a rank posts messages, computes blocks and waits.

Only this module defines the order. The runtime follows the program with tensors (`runtime.passes`), the cost
model with the clocks of all units (`cost.overlap`), the simulator event by event
(`lab.simulator.unit_program`), and tests under NCCL's rules. The program has no sizes; those are in the split
tables (`plan.schedule`).

    post the "in" all-to-alls; wait for the first; post the keys of the first `window` steps
    own block: one half of the heads after the other, each when its "in" all-to-all has arrived
    each step: post the keys of the step `window` later; for each part, wait for its keys, compute its blocks
    "out" all-to-alls: post each when its half of the heads is computed; wait for all of them

In the backward pass each part also posts gradients of keys and values when its blocks are computed, and a
step ends with the wait for the gradients of the step `window` before. The own block is then cut in two: the
first half is computed before the steps and hides the transfer of the first keys; the second half is computed
after the steps and hides the transfer of the last gradients and the first "out" all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

#: Kinds of messages. `in`: the all-to-all from tokens to heads. `keys`: keys and values, sent to the ranks
#: that use them. `gradients`: gradients of keys and values, returned to their owners. `out`: the all-to-all
#: from heads to tokens.
Cargo = Literal["in", "keys", "gradients", "out"]


class Batch(NamedTuple):
    """Messages that are posted and waited for together.

    Args:
        step: step of the exchange, from 0; for an all-to-all, the number of the half of the heads.
        part: part of the step, from 0.
    """

    cargo: Cargo
    step: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Post:
    """Start sending and receiving a batch, after the batches that were posted before."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until all messages of a batch are received and sent."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class OwnBlock:
    """Compute attention to the keys of the rank's own group, for one half of the heads or for both.

    Args:
        first: number of the first half, 0 or 1.
        stop: number of the last half + 1; 0 and 2 stand for all heads at once.
    """

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class FarBlocks:
    """Compute attention to keys received from another group: the blocks of one part of an exchange step.

    Args:
        piece: ``None``: all heads of the part. If the half of the heads whose output is sent first ends
            within the part, 0: the heads of this half, 1: the remaining heads.
    """

    step: int
    part: int
    piece: int | None = None


Operation = Post | Wait | OwnBlock | FarBlocks


@lru_cache(maxsize=128)  # a search asks for few shapes, over and over
def attention_program(
    backward: bool, parts: tuple[int, ...], window: int, halves: int, turn: int
) -> tuple[Operation, ...]:
    """Return the operations of a rank in the forward or backward pass of attention, in order.

    Args:
        window: number of steps whose keys are in flight ahead of the step in use.
        halves: number of all-to-alls that carry the query heads in each direction, 1 or 2.
        turn: number of the part of the last step in which the half of the heads whose output is sent first
            ends, in the forward pass.
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
