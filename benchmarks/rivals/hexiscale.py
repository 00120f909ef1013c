"""HexiScale's planner by the rules of its authors' code.

https://github.com/Relaxed-System-Lab/FlashFlex/tree/5ee1726/experimental (Apache-2.0), restated:

    pipelines   parts of about equal nominal TFLOP/s with the least cut of 1 / bandwidth
    order       of a pipeline's machines, by the time of the pipeline
    stages      each machine's GPUs in one of a few tensor-parallel splits (8: [8], [4, 4] or [4, 2, 2]), the
                one of the least time of a pipeline that has all layers on that machine
    layers      in turn as long as a stage's part of the layers stays below its part of the memory, the rest
                to the stages with the most
    batch       the same for all pipelines
    time        1.8 times the slowest pipeline, all passes as if forward and backward were one, and 1.1 times
                the gradients of all layers, one after the other

Theirs is a random walk: METIS cuts the GPUs into pipelines, and each pipeline into one to three groups by
chance, which only change the order of its machines and which GPUs of a machine share a stage; the number of
pipelines goes up or down by one, at most to a fifth of the GPUs. Here every number of pipelines is tried
once, with Kernighan and Lin's swaps (`planner/baselines/hexiscale.py`) in place of METIS, and every order of
up to five machines. Their order of groups is meant to be a path over links, but follows the groups' numbers:
from each group it takes the path that is last in lexicographic order, of these the thinnest.

Kept as it is: micro-batches are those of the first number of pipelines, whatever the number becomes, while
all samples count; so fewer pipelines look faster than they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.rivals.readings.hexiscale import partition

_GIB, _TERA = 1024**3, 1024**4
#: Tensor-parallel splits of a machine's GPUs that are considered.
_SPLITS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,),),
    2: ((2,), (1, 1)),
    3: ((2, 1), (1, 1, 1)),
    4: ((4,), (2, 2), (2, 1, 1)),
    5: ((4, 1), (2, 2, 1)),
    6: ((4, 2), (2, 2, 2)),
    7: ((4, 2, 1), (2, 2, 2, 1)),
    8: ((8,), (4, 4), (4, 2, 2)),
}
#: FLOPs and sums of a layer count one and a third times where activations are recomputed: 96 of 72, 12 of 8.
_FLOPS, _SUMS = 96, 12
#: Of a pipeline's time and of the gradients'.
_PIPELINE, _GRADIENTS = 1.8, 1.1
#: The most machines of a pipeline of which every order is tried.
_ORDERED = 5
#: Bytes of an element, and of a weight with its gradient and state.
_ELEMENT, _WEIGHT = 2, 8


class Gpu(NamedTuple):
    """A GPU.

    Args:
        machine: its machine.
        tflops: nominal TFLOP/s.
        memory: GB.
        inside: GB/s between two of its machine.
    """

    machine: int
    tflops: float
    memory: float
    inside: float


@dataclass(frozen=True)
class Training:
    """A job as HexiScale sees it.

    Args:
        layers: number of layers.
        hidden: hidden size.
        batch: samples of an iteration.
        micro: samples of a micro-batch of all pipelines together.
        pipelines: the first number of pipelines.
        vocabulary: number of words.
        sequence: tokens of a sample.
    """

    layers: int
    hidden: int
    batch: int
    micro: int
    pipelines: int
    vocabulary: int = 32000
    sequence: int = 4096

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch of a pipeline."""
        return self.micro // self.pipelines * self.sequence

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a pipeline."""
        return self.batch // self.micro


#: GPUs of each stage, and the stage's layers, for a pipeline.
type Pipeline = tuple[tuple[tuple[int, ...], int], ...]


class Choice(NamedTuple):
    """A layout that HexiScale chose, and its seconds as HexiScale estimates them."""

    pipelines: tuple[Pipeline, ...]
    seconds: float


class Scheduler:
    """Chooses pipelines on a cluster.

    Args:
        gpus: all GPUs, those of a machine together.
        between: GB/s between two machines.
        training: the job.
    """

    def __init__(self, gpus: Sequence[Gpu], between: float, training: Training) -> None:
        self._gpus, self._training = gpus, training
        machine, inside = np.array([gpu.machine for gpu in gpus]), np.array([gpu.inside for gpu in gpus])
        links = np.where(machine[:, None] == machine, inside[:, None], between) * _GIB
        np.fill_diagonal(links, np.inf)
        #: Bytes/s between two GPUs.
        self._links = links

    def choose(self) -> Choice | None:
        """Return the choice of the least time; ``None``: none fits."""
        return min(self._choices(), key=lambda choice: choice.seconds, default=None)

    def _choices(self) -> Iterator[Choice]:
        least = len(self._gpus) // self._training.layers + 1
        # Machines' first GPUs before their second ones, for runs of vertices to begin with.
        turn = [number - self._first(gpu.machine) for number, gpu in enumerate(self._gpus)]
        order = np.argsort(turn, kind="stable")
        speeds, slow = np.array([gpu.tflops for gpu in self._gpus]), 1.0 / self._links
        for number in sorted({self._training.pipelines, *range(least, len(self._gpus) // 5 + 1)}):
            part = partition(slow[np.ix_(order, order)], speeds[order], number)
            parts = [sorted(order[part == pipeline].tolist()) for pipeline in range(number)]
            pipelines = [self.pipeline(gpus) for gpus in parts]
            if all(pipeline is not None for pipeline in pipelines):
                chosen = tuple(pipeline for pipeline in pipelines if pipeline is not None)
                yield Choice(chosen, self.seconds(chosen))

    def _first(self, machine: int) -> int:
        return next(number for number, gpu in enumerate(self._gpus) if gpu.machine == machine)

    def pipeline(self, gpus: Sequence[int]) -> Pipeline | None:
        """Return the pipeline on these GPUs; ``None``: it does not fit in any order."""
        machines = [
            self._split(list(own))
            for _, own in itertools.groupby(gpus, key=lambda gpu: self._gpus[gpu].machine)
        ]
        orders = itertools.permutations(machines) if len(machines) <= _ORDERED else [machines]
        pipelines = (self.with_layers(list(itertools.chain(*order))) for order in orders)
        return min(filter(self._fits, pipelines), key=self._pipeline_seconds, default=None)

    def _split(self, gpus: list[int]) -> list[tuple[int, ...]]:
        """Return the tensor-parallel units of a machine."""
        splits = [
            [tuple(gpus[stop - width : stop]) for width, stop in zip(widths, ends, strict=True)]
            for widths in _SPLITS[len(gpus)]
            for ends in [list(itertools.accumulate(widths))]
        ]
        return min(splits, key=lambda split: self._pipeline_seconds(self._alone(split)))

    def with_layers(self, units: Sequence[tuple[int, ...]]) -> Pipeline:
        """Return the pipeline whose stages are these units, in this order."""
        return tuple(zip(units, self._layers(units), strict=True))

    def seconds(self, pipelines: Sequence[Pipeline]) -> float:
        """Return the seconds of an iteration, as HexiScale estimates them."""
        slowest = max(map(self._pipeline_seconds, pipelines))
        return _PIPELINE * slowest + _GRADIENTS * self._gradient_seconds(pipelines)

    def _alone(self, split: Sequence[tuple[int, ...]]) -> Pipeline:
        """Return a pipeline of one machine that has all layers, in proportion to GPUs."""
        every = self._training.layers
        layers = [every * len(unit) // sum(map(len, split)) for unit in split]
        layers[-1] += every - sum(layers)
        return tuple(zip(split, layers, strict=True))

    def _layers(self, units: Sequence[tuple[int, ...]]) -> list[int]:
        memory = np.array([sum(self._gpus[gpu].memory for gpu in unit) for unit in units])
        every, layers = self._training.layers, [0] * len(units)
        share = memory / memory.sum()
        growing = True
        while growing and sum(layers) < every:
            growing = False
            for number in range(len(units)):
                if sum(layers) < every and (layers[number] + 1) / every <= share[number]:
                    layers[number] += 1
                    growing = True
        most = np.argsort(memory)[::-1]
        for number in itertools.islice(itertools.cycle(most), every - sum(layers)):
            layers[number] += 1
        return layers

    def _fits(self, stages: Pipeline) -> bool:
        job = self._training
        for number, (unit, layers) in enumerate(stages):
            weights = layers * 12 * job.hidden**2 / len(unit)
            weights += job.hidden * (job.vocabulary + job.sequence) * (number == 0)
            weights += job.hidden * (1 + job.vocabulary) * (number == len(stages) - 1)
            rows = job.rows * job.hidden * (layers / len(unit) + 2)
            needed = (weights * _WEIGHT + rows * _ELEMENT) / _GIB
            if needed > sum(self._gpus[gpu].memory for gpu in unit) / len(unit):
                return False
        return True

    def _pipeline_seconds(self, stages: Pipeline) -> float:
        """Return the seconds of GPipe's columns: in each the slowest of the stages that work."""
        sends = [self._send(one, other) for (one, _), (other, _) in itertools.pairwise(stages)]
        busy = [
            layers * self._layer_seconds(unit) + send
            for (unit, layers), send in zip(stages, [*sends, 0.0], strict=True)
        ]
        columns = range(self._training.micro_batches + len(stages) - 1)
        last = self._training.micro_batches
        return sum(
            max(span for place, span in enumerate(busy) if place <= column < place + last)
            for column in columns
        )

    def _layer_seconds(self, unit: tuple[int, ...]) -> float:
        job = self._training
        more = job.sequence / (6 * job.hidden) + job.vocabulary / (16 * job.layers * job.hidden)
        work = _FLOPS * job.rows * job.hidden**2 * (1 + more)
        share = _SUMS * job.rows * job.hidden * _ELEMENT / len(unit)
        return work / (self._gpus[unit[0]].tflops * _TERA * len(unit)) + self._slowest(unit, share)

    def _slowest(self, unit: Sequence[int], size: float) -> float:
        """Return the seconds in which the slowest GPU sends so many bytes to each other one in turn."""
        return max(sum(size / self._links[one, other] for other in unit if other != one) for one in unit)

    def _send(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        job = self._training
        size = job.rows * job.hidden * _ELEMENT
        spread = {
            one: sum(size / len(after) / self._links[one, other] for other in after if other != one)
            for one in after
        }
        return 2 * min(
            float(size / self._links[here, there]) + spread[there] for here in before for there in after
        )

    def _gradient_seconds(self, pipelines: Sequence[Pipeline]) -> float:
        job, total = self._training, 0.0
        owners = [[unit for unit, layers in pipeline for _ in range(layers)] for pipeline in pipelines]
        for units in zip(*owners, strict=True):
            widest, least = max(map(len, units)), min(map(len, units))
            rings = [[unit[rank * len(unit) // widest] for unit in units] for rank in range(widest // least)]
            size = 2 * 12 * job.hidden**2 * _ELEMENT / least
            total += sum(self._slowest(ring, size / len(ring)) for ring in rings)
        return total
