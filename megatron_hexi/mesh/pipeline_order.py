"""The order in which the stages of a replica run forward and backward passes: 1F1B, with chunks interleaved.

Each stage first runs some passes forward, the more the earlier it stands (`passes_ahead`), then one forward
and one backward in turn, then the remaining backward passes. A forward pass needs the activations of the
stage before, a backward pass the gradients of the stage after.

A stage's layers may be cut into chunks (Megatron's interleaved schedule; Narayanan et al., arXiv 2104.04473,
section 2.2): the model runs through all stages once for each chunk, and the last stage sends its output to
the first. As many micro-batches as there are stages run through a chunk, then they run through the next one.
If too few are left for the last such group, the passes of the missing ones are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, Self


class _Number(Protocol):
    """An integer, or an array of integers."""

    def __mul__(self, other: int, /) -> Self: ...
    def __add__(self, other: int, /) -> Self: ...
    def __rsub__(self, other: int, /) -> Self: ...


class PipelineStep(NamedTuple):
    """A micro-batch's pass through a stage, or through a chunk of the stage's layers."""

    way: Literal["forward", "backward"]
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

    def step(way: Literal["forward", "backward"], number: int) -> PipelineStep:
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


@lru_cache(maxsize=64)
def interleaved_order(stages: int, micro_batches: int, chunks: int) -> tuple[tuple[int, PipelineStep], ...]:
    """Return the passes of all stages, each with its stage, after the passes that it needs."""
    own = [pipeline_steps(stages, stage, micro_batches, chunks) for stage in range(stages)]
    place = [0] * stages
    done: dict[tuple[int, PipelineStep], None] = {}
    while len(done) < sum(map(len, own)):
        before = len(done)
        for stage, steps in enumerate(own):
            while place[stage] < len(steps):
                step = steps[place[stage]]
                source = step_source(stages, stage, step, chunks)
                if source is not None and source not in done:
                    break
                done[stage, step] = None
                place[stage] += 1
        assert len(done) > before, "no pass waits for itself"
    return tuple(done)


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
