"""The order in which the stages of a replica run forward and backward passes: 1F1B, interleaved, or in turn.

The runtime executes it, the cost model gives each pass its seconds, and pictures draw it.

In 1F1B each stage first runs some passes forward, the more the earlier it stands (`passes_ahead`), then one
forward and one backward in turn, then the remaining backward passes. A forward pass needs the activations of
the stage before, a backward pass the gradients of the stage after.

A stage's layers may be cut into chunks (Megatron's interleaved schedule; Narayanan et al., arXiv 2104.04473,
section 2.2): the model runs through all stages once for each chunk, and the last stage sends its output to
the first. As many micro-batches as there are stages run through a chunk, then they run through the next one.
If too few are left for the last such group, the passes of the missing ones are left out. Ministages with
`order: interleaved` are such chunks, of any length.

Other ministages run in turn: all micro-batches pass a ministage before the next one runs.

>>> def show(stages, micro_batches, ministages, in_turn):
...     for stage in range(stages):
...         runs = stage_runs(stages, stage, micro_batches, ministages, in_turn=in_turn)
...         print(*(f"{step.way[0].upper()}{step.micro_batch}" for run in runs for step in run.steps))
>>> show(stages=3, micro_batches=4, ministages=1, in_turn=False)
F0 F1 F2 B0 F3 B1 B2 B3
F0 F1 B0 F2 B1 F3 B2 B3
F0 B0 F1 B1 F2 B2 F3 B3
>>> show(stages=3, micro_batches=4, ministages=1, in_turn=True)
F0 F1 F2 F3 B0 B1 B2 B3
F0 F1 F2 F3 B0 B1 B2 B3
F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, Self

#: The direction of a pass through layers.
Way = Literal["forward", "backward"]


class _Number(Protocol):
    """An integer, or an array of integers."""

    def __mul__(self, other: int, /) -> Self: ...
    def __add__(self, other: int, /) -> Self: ...
    def __rsub__(self, other: int, /) -> Self: ...


class PipelineStep(NamedTuple):
    """A micro-batch's pass through a stage, or through a chunk of the stage's layers."""

    way: Way
    micro_batch: int
    chunk: int = 0


def passes_ahead[N: _Number](stages: int, stage: N, chunks: int) -> N:
    """Return the number of passes that a stage runs forward before 1F1B begins, if there are enough.

    Args:
        stage: number of the stage, from 0, or an array of such numbers.
        chunks: number of chunks of each stage's layers; several are run as by Megatron's
            `get_pp_rank_microbatches`.
    """
    behind = (stages - 1) - stage
    return behind if chunks == 1 else behind * 2 + (chunks - 1) * stages


@lru_cache(maxsize=256)
def pipeline_steps(stages: int, stage: int, micro_batches: int, chunks: int = 1) -> tuple[PipelineStep, ...]:
    """Return the passes of a stage in one iteration, in order.

    Args:
        stage: number of the stage, from 0.
    """
    return tuple(
        step for step in _steps(stages, stage, micro_batches, chunks) if step.micro_batch < micro_batches
    )


def _steps(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[PipelineStep]:
    """Yield the passes of a stage, in order; with chunks, of as many micro-batches as fill the last group."""
    count = micro_batches if chunks == 1 else -(-micro_batches // stages) * stages * chunks
    ahead = min(passes_ahead(stages, stage, chunks), count)

    def step(way: Way, number: int) -> PipelineStep:
        group, place = divmod(number, stages * chunks)
        chunk, micro_batch = divmod(place, stages)
        return PipelineStep(
            way, group * stages + micro_batch, chunk if way == "forward" else chunks - 1 - chunk
        )

    for number in range(ahead):
        yield step("forward", number)
    for number in range(count - ahead):
        yield step("forward", ahead + number)
        yield step("backward", number)
    for number in range(count - ahead, count):
        yield step("backward", number)


def step_source(stages: int, stage: int, step: PipelineStep, chunks: int) -> tuple[int, PipelineStep] | None:
    """Return the stage and the pass in it whose output is the input of the given pass.

    ``None``: the input is tokens or the gradient of the loss, which no other pass gives.
    """
    by = -1 if step.way == "forward" else 1
    neighbour, chunk = stage + by, step.chunk
    if not 0 <= neighbour < stages:
        neighbour, chunk = neighbour % stages, chunk + by
    return (neighbour, step._replace(chunk=chunk)) if 0 <= chunk < chunks else None


@dataclass(frozen=True)
class MinistagePass:
    """A pass of all micro-batches, one after the other, through one ministage.

    Args:
        way: `forward`, which keeps the ministage's input rows; `backward`, which recomputes the ministage
            from these rows; or `turn`, for the ministage with the loss: forward and backward of each
            micro-batch in turn.
        weights: ministages whose fetched weights are on the device during the pass: this ministage, and the
            ministage of the next pass, whose weights are being fetched.
        gradients: ministages whose gradients are on the device during the pass: this ministage, and the
            ministage of the pass before, whose gradients are being reduced.
    """

    ministage: int
    way: Literal["forward", "backward", "turn"]
    weights: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def is_backward(self) -> bool:
        """Whether the pass computes gradients."""
        return self.way != "forward"


@lru_cache(maxsize=64)
def ministage_passes(
    ministages: int, gives_loss: bool, forward_only: bool = False
) -> tuple[MinistagePass, ...]:
    """Return the passes of a stage's ministages in one iteration, in order.

    Args:
        gives_loss: whether the stage is the last of its replica.
        forward_only: whether the iteration is an evaluation, without backward passes.
    """
    numbers = range(ministages)
    ways: list[tuple[int, Literal["forward", "backward", "turn"]]] = [(n, "forward") for n in numbers]
    if not forward_only:
        *before, last = numbers
        if gives_loss:
            ways[last] = last, "turn"
        else:
            ways.append((last, "backward"))
        ways += [(number, "backward") for number in reversed(before)]
    passes: list[MinistagePass] = []
    for place, (number, way) in enumerate(ways):
        following = ways[place + 1 : place + 2]
        weights = dict.fromkeys((number, *(next_number for next_number, _ in following)))
        leaving = passes[-1].ministage if passes and passes[-1].is_backward else number
        gradients = () if way == "forward" else tuple(dict.fromkeys((number, leaving)))
        passes.append(MinistagePass(number, way, tuple(weights), gradients))
    return tuple(passes)


class StageRun(NamedTuple):
    """Passes of a stage through one ministage, one after the other.

    Args:
        in_turn: the pass of all micro-batches that these passes are; ``None``: ministages are interleaved.
    """

    stage: int
    steps: tuple[PipelineStep, ...]
    in_turn: MinistagePass | None = None


def stage_runs(
    stages: int, stage: int, micro_batches: int, ministages: int, *, in_turn: bool
) -> tuple[StageRun, ...]:
    """Return the passes of a stage in one iteration, in order.

    Args:
        stage: number of the stage, from 0.
        in_turn: whether all micro-batches pass a ministage before the next one runs.
    """
    if not in_turn:
        return tuple(
            StageRun(stage, (one,)) for one in pipeline_steps(stages, stage, micro_batches, ministages)
        )
    return tuple(
        StageRun(
            stage,
            tuple(
                PipelineStep(way, micro_batch, one.ministage)
                for micro_batch in range(micro_batches)
                for way in (("forward", "backward") if one.way == "turn" else (one.way,))
            ),
            one,
        )
        for one in ministage_passes(ministages, gives_loss=stage == stages - 1)
    )


@lru_cache(maxsize=32)
def pipeline_runs(
    stages: int, micro_batches: int, ministages: int, *, in_turn: bool
) -> tuple[tuple[StageRun, tuple[int | None, ...]], ...]:
    """Return the runs of all stages, each after the passes that it needs, with the inputs of its passes.

    An input is the number of the pass that gives it, in this order; ``None``: see `step_source`.
    """
    waiting = [
        deque(stage_runs(stages, stage, micro_batches, ministages, in_turn=in_turn))
        for stage in range(stages)
    ]
    numbers: dict[tuple[int, PipelineStep] | None, int | None] = {None: None}
    found: list[tuple[StageRun, tuple[int | None, ...]]] = []
    while any(waiting):
        before = len(found)
        for stage, runs in enumerate(waiting):
            while runs:
                sources = [step_source(stages, stage, step, ministages) for step in runs[0].steps]
                if not all(source in numbers for source in sources):
                    break
                found.append((runs[0], tuple(numbers[source] for source in sources)))
                for step in runs.popleft().steps:
                    numbers[stage, step] = len(numbers) - 1
        assert len(found) > before, "no pass waits for itself"
    return tuple(found)


def most_kept(stages: int, stage: int, micro_batches: int, sizes: Sequence[float]) -> float:
    """Return the most layers whose activations a stage keeps at a time, from forward to backward pass.

    Args:
        stage: number of the stage, from 0.
        sizes: number of layers of each chunk of the stage; a layer counts once for each micro-batch.
    """
    kept = most = 0.0
    for step in pipeline_steps(stages, stage, micro_batches, len(sizes)):
        kept += sizes[step.chunk] if step.way == "forward" else -sizes[step.chunk]
        most = max(most, kept)
    return most
