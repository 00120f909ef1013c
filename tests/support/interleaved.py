"""Megatron's interleaved schedule as its source has it, event by event, with nothing of the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Way = Literal["F", "B"]


class Pass(NamedTuple):
    """A micro-batch's pass through a chunk of a stage."""

    way: Way
    stage: int
    micro_batch: int
    chunk: int


class Action(NamedTuple):
    """An action of a stage: runs a pass, posts its send or its receive, or waits for that."""

    kind: Literal["run", "send", "receive", "sent", "received"]
    which: Pass


def interleaved_actions(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterator[Action]:
    """Yield what a stage does, as `forward_backward_pipelining_with_interleaving` of Megatron-Core 0.19.

    Groups are of as many micro-batches as stages, and sends overlap, both as by default: in line before and
    behind the steady state, and within it activations in line, too (`deallocate_pipeline_outputs`).
    """
    order = [
        (micro_batch, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for micro_batch in range(first, first + stages)
    ]
    total = len(order)
    warm_up = min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)

    def forward(number: int) -> Pass:
        return Pass("F", stage, *order[number])

    def backward(number: int) -> Pass:
        micro_batch, chunk = order[number]
        return Pass("B", stage, micro_batch, chunks - 1 - chunk)

    def has_input(one: Pass) -> bool:
        if one.way == "F":
            return (one.stage, one.chunk) != (0, 0)
        return (one.stage, one.chunk) != (stages - 1, chunks - 1)

    def has_output(one: Pass) -> bool:
        if one.way == "F":
            return (one.stage, one.chunk) != (stages - 1, chunks - 1)
        return (one.stage, one.chunk) != (0, 0)

    def posted(one: Pass | None, following: Pass | None) -> Iterator[Action]:
        if one is not None and has_output(one):
            yield Action("send", one)
        if following is not None and has_input(following):
            yield Action("receive", following)

    def waited(one: Pass | None, following: Pass | None) -> Iterator[Action]:
        if one is not None and has_output(one):
            yield Action("sent", one)
        if following is not None and has_input(following):
            yield Action("received", following)

    yield from posted(None, forward(0))
    yield from waited(None, forward(0))
    for k in range(warm_up):
        yield Action("run", forward(k))
        both = forward(k), forward(k + 1) if k + 1 < total else None
        yield from posted(*both)
        yield from waited(*both)
    yield from posted(None, backward(0))
    for k in range(total - warm_up):
        ahead = warm_up + k
        yield from waited(None, forward(ahead))
        yield Action("run", forward(ahead))
        yield from posted(forward(ahead), forward(ahead + 1) if ahead + 1 < total else None)
        yield from waited(forward(ahead), None)
        yield from waited(None, backward(k))
        yield Action("run", backward(k))
        yield from posted(backward(k), backward(k + 1) if k + 1 < total else None)
        if k > 0:
            yield from waited(backward(k - 1), None)
    if total > warm_up:
        yield from waited(backward(total - warm_up - 1), None)
    for k in range(total - warm_up, total):
        yield from waited(None, backward(k))
        yield Action("run", backward(k))
        both = backward(k), backward(k + 1) if k + 1 < total else None
        yield from posted(*both)
        yield from waited(*both)


def interleaved_end(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    sends: Sequence[float],
    micro_batches: int,
) -> tuple[float, list[int]]:
    """Return when the last stage has ended, and the most chunk passes whose activations each stage keeps.

    A message moves once both sides have posted it.

    Args:
        forward: seconds of each chunk's forward pass, [stages][chunks].
        backward: likewise.
        sends: seconds of a message over each border, [stages], the last one between last stage and first.
        micro_batches: a multiple of the stages.
    """
    stages, chunks = len(forward), len(forward[0])
    queues = [list(interleaved_actions(stage, stages, chunks, micro_batches)) for stage in range(stages)]
    place, clock = [0] * stages, [0.0] * stages
    kept, most = [0] * stages, [0] * stages
    sent: dict[Pass, float] = {}
    awaited: dict[Pass, float] = {}

    def source(one: Pass) -> Pass:
        by = -1 if one.way == "F" else 1
        stage = one.stage + by
        turn = by if stage in (-1, stages) else 0
        return one._replace(stage=stage % stages, chunk=one.chunk + turn)

    def target(one: Pass) -> Pass:
        by = 1 if one.way == "F" else -1
        stage = one.stage + by
        turn = by if stage in (-1, stages) else 0
        return one._replace(stage=stage % stages, chunk=one.chunk + turn)

    def moved(sender: Pass, receiver: Pass) -> float | None:
        if sender not in sent or receiver not in awaited:
            return None
        border = sender.stage if sender.way == "F" else receiver.stage
        return max(sent[sender], awaited[receiver]) + sends[border]

    going = True
    while going:
        going = False
        for stage, queue in enumerate(queues):
            while place[stage] < len(queue):
                kind, which = queue[place[stage]]
                if kind == "run":
                    seconds = forward if which.way == "F" else backward
                    clock[stage] += seconds[stage][which.chunk]
                    kept[stage] += 1 if which.way == "F" else -1
                    most[stage] = max(most[stage], kept[stage])
                elif kind == "send":
                    sent[which] = clock[stage]
                elif kind == "receive":
                    awaited[which] = clock[stage]
                else:
                    end = moved(which, target(which)) if kind == "sent" else moved(source(which), which)
                    if end is None:
                        break
                    clock[stage] = max(clock[stage], end)
                place[stage] += 1
                going = True
    assert all(at == len(queue) for at, queue in zip(place, queues, strict=True)), "the schedule hangs"
    return max(clock), most
