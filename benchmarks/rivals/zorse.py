"""Zorse's planner by the rules of its authors' code (https://github.com/benson-guo/zorse/tree/2fd6330, MIT).

`zorse_planner.py` and `zorse_optimizer/`, restated:

    groups         from as many as there are machines down to one: the least of all groups' minimum cuts
                   (Stoer and Wagner) is taken until there are enough. Edges are whole GB/s between two GPUs
    order          the group whose layers are gathered fastest, then the group with the fastest mean link
    micro-batches  sizes of 2, 4, ... up to half the batch, as long as memory holds the groups' layers. Each
                   GPU of a group takes whole micro-batches by its speed, the rest by descending speed
    layers         by the time that a group takes for a layer of all micro-batches
    ministages     every number up to that of the groups and two
    time           of one micro-batch in, all micro-batches of the busiest group, one micro-batch out

Kept as they are: seconds of gathers by the communication model stand beside milliseconds of all else, so they
count nothing; the fill passes one ministage more than there are groups; memory counts neither logits nor
embeddings, and where a group does not fit without ministages no larger micro-batch is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats

_GIB = 1024**3
#: Bytes of a weight in 16 bits, and of its optimizer state; GiB that are kept free (arguments' defaults).
_WEIGHT, _STATE, _RESERVED = 2, 12, 2.0
#: What their collectives take of the time of the bytes.
_COLLECTIVE = 1.15
#: Bytes of a message up to which its time hardly grows.
_SHORT = 10**7


class LayerTime(NamedTuple):
    """Milliseconds of a layer for one micro-batch."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward


@dataclass(frozen=True, eq=False)
class Machines:
    """A cluster as Zorse sees it.

    Args:
        kinds: kind of each GPU.
        machine: machine of each GPU.
        bandwidth: GB/s between GPUs of two machines, or of one, [machines, machines].
        latency: milliseconds of a message of 10 MB, [machines, machines].
        memory: GiB of each kind.
    """

    kinds: Sequence[str]
    machine: Sequence[int]
    bandwidth: Floats
    latency: Floats
    memory: dict[str, float]


@dataclass(frozen=True)
class Training:
    """A job as Zorse sees it.

    Args:
        batch: samples of an iteration.
        sequence: tokens of a sample.
        hidden: hidden size.
        layers: number of layers.
        layer_params: weights of a layer.
    """

    batch: int
    sequence: int
    hidden: int
    layers: int
    layer_params: float


class Choice(NamedTuple):
    """A layout that Zorse chose.

    Args:
        size: samples of a micro-batch.
        groups: GPUs of each stage.
        micro_batches: number of whole micro-batches of each GPU, stage by stage.
        layers: layers of each ministage, stage by stage.
        milliseconds: of an iteration, as Zorse estimates it.
    """

    size: int
    groups: tuple[tuple[int, ...], ...]
    micro_batches: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, ...], ...]
    milliseconds: float


class _Stage(NamedTuple):
    """A group as it is timed.

    Args:
        layer: time of a layer on each GPU.
        micro_batches: number of micro-batches of each GPU.
        gather: time of a layer's weights.
        scatter: time of a layer's gradients.
        sends: time of a micro-batch's rows to the group before, and to the group behind.
    """

    layer: Sequence[LayerTime]
    micro_batches: Sequence[int]
    gather: float
    scatter: float
    sends: tuple[float, float]


#: Milliseconds of a layer by kind of GPU, for a micro-batch size.
type LayerTimes = dict[int, dict[str, LayerTime]]


def choose(machines: Machines, training: Training, times: LayerTimes) -> Choice | None:
    """Return the layout of the least time; ``None``: none fits.

    Args:
        machines: the cluster.
        training: the job.
        times: of every micro-batch size that may be tried (`sizes`).
    """
    choices = (
        choice
        for groups in k_cuts(machines)
        for choice in _sized(machines, training, _ordered(machines, training, groups), times)
    )
    return min(choices, key=lambda choice: choice.milliseconds, default=None)


def sizes(batch: int) -> list[int]:
    """Return the micro-batch sizes that are tried."""
    return [2**power for power in range(1, batch.bit_length() - 1)]


def k_cuts(machines: Machines) -> Iterator[list[list[int]]]:
    """Yield groups of GPUs for each number of groups, from the number of machines down to one."""
    count = len(set(machines.machine))
    edges = np.maximum(machines.bandwidth[np.ix_(machines.machine, machines.machine)].astype(int), 1)
    np.fill_diagonal(edges, 0)
    splits = [[list(range(len(machines.kinds)))]]
    while len(splits) < count:
        groups = splits[-1]
        cuts = [
            (_least_cut(edges[np.ix_(group, group)]), number)
            for number, group in enumerate(groups)
            if len(group) > 1
        ]
        (_, side), number = min(cuts, key=lambda cut: cut[0][0])
        sides = list(zip(groups[number], side, strict=True))
        halves = [[gpu for gpu, there in sides if there == half] for half in (False, True)]
        splits.append([*groups[:number], *halves, *groups[number + 1 :]])
    yield from reversed(splits)


def _least_cut(edges: Floats) -> tuple[float, list[bool]]:
    """Return the weight of the minimum cut and one side of it, by Stoer and Wagner's algorithm (1997)."""
    weights, merged = edges.astype(float), [{vertex} for vertex in range(len(edges))]
    left, best = np.ones(len(edges), bool), (np.inf, set[int]())
    while left.sum() > 1:
        reached = np.where(left, 0.0, -np.inf)
        last, cut = -1, 0.0
        for _ in range(int(left.sum())):
            before, last = last, int(np.argmax(reached))
            cut = float(reached[last])
            reached += weights[last]
            reached[last] = -np.inf
        if cut < best[0]:
            best = cut, set(merged[last])
        weights[before] += weights[last]
        weights[:, before] += weights[:, last]
        weights[before, before] = 0.0
        merged[before] |= merged[last]
        left[last] = False
    return best[0], [vertex in best[1] for vertex in range(len(edges))]


def _ordered(machines: Machines, training: Training, groups: list[list[int]]) -> list[list[int]]:
    left = sorted(groups, key=lambda group: _gather(machines, training, group, 2))
    path = [left.pop(0)]
    while left:
        here = _places(machines, path[-1])
        means = [float(machines.bandwidth[np.ix_(here, _places(machines, group))].mean()) for group in left]
        path.append(left.pop(int(np.argmax(means))))
    return path


def _places(machines: Machines, group: Sequence[int]) -> list[int]:
    return sorted({machines.machine[gpu] for gpu in group})


def _gather(machines: Machines, training: Training, group: Sequence[int], size: int) -> float:
    """Return the time of a ring over a layer's weights of `size` bytes, in seconds."""
    places = [machines.machine[gpu] for gpu in group]
    ring = machines.bandwidth[places, [*places[1:], places[0]]]
    part = training.layer_params * size / _GIB / len(group)
    return _COLLECTIVE * (len(group) - 1) * part / float(ring.min())


def _send(
    machines: Machines, training: Training, one: Sequence[int], other: Sequence[int], size: int
) -> float:
    """Return the milliseconds of a micro-batch's rows between two groups."""
    here, there = _places(machines, one), _places(machines, other)
    message = size * training.sequence * training.hidden * 2
    inside = [place for place in here if place in there]
    latency = machines.latency[here[-1], here[-1]] if inside else machines.latency[here[-1], there[-1]]
    if message <= _SHORT:
        return float(latency * (0.8 + 0.2 * message / _SHORT))
    slowest = max(float(machines.bandwidth[np.ix_(here, there)].min()), 1e-4)
    return float(latency + (message - _SHORT) / _GIB * 1000 / slowest)


def _sized(
    machines: Machines, training: Training, groups: list[list[int]], times: LayerTimes
) -> Iterator[Choice]:
    """Yield the best choice of each micro-batch size whose groups fit without ministages."""
    for size in sizes(training.batch):
        layer = [[times[size][machines.kinds[gpu]] for gpu in group] for group in groups]
        dealt = [_shares(training.batch // size, [1 / time.total for time in own]) for own in layer]
        spans = [
            max(time.total * count for time, count in zip(own, counts, strict=True))
            for own, counts in zip(layer, dealt, strict=True)
        ]
        layers = _shares(training.layers, [1 / span for span in spans])
        kept = [number for number, count in enumerate(layers) if count]
        if not _fits(machines, training, groups, size, [(layers[number],) for number in kept], kept):
            return
        sends = [
            0.0,
            *(_send(machines, training, *pair, size) for pair in itertools.pairwise(groups)),
            0.0,
        ]
        stages = [
            _Stage(
                layer[number],
                dealt[number],
                _gather(machines, training, groups[number], 2),
                _gather(machines, training, groups[number], 4),
                (sends[number], sends[number + 1]),
            )
            for number in kept
        ]
        counts, paces = [layers[number] for number in kept], [spans[number] for number in kept]
        degrees = [1] if len(groups) == 1 else range(1, min(training.layers // 2, len(kept)) + 3)
        found = []
        for degree in degrees:
            chunks = _interleaved(counts, paces, degree)
            if chunks is not None and _fits(machines, training, groups, size, chunks, kept):
                found.append((_milliseconds(stages, chunks, len(groups)), chunks))
        if found:
            whole, chunks = min(found, key=lambda pair: pair[0])
            yield Choice(
                size,
                tuple(tuple(groups[number]) for number in kept),
                tuple(tuple(dealt[number]) for number in kept),
                tuple(chunks),
                whole,
            )


def _shares(total: int, speeds: Sequence[float]) -> list[int]:
    """Return whole parts in proportion to speeds; the rest goes one by one to the fastest."""
    shares = [int(total * (speed / sum(speeds))) for speed in speeds]
    fastest = sorted(range(len(speeds)), key=lambda number: -speeds[number])
    for number in itertools.islice(itertools.cycle(fastest), total - sum(shares)):
        shares[number] += 1
    return shares


def _interleaved(layers: Sequence[int], spans: Sequence[float], degree: int) -> list[tuple[int, ...]] | None:
    """Return the layers of each ministage; ``None``: a stage has too few."""
    chunks = [[count // degree] * degree for count in layers]
    if min(map(min, chunks)) == 0:
        return None
    extra = sum(count % degree for count in layers)
    soonest = sorted(range(len(layers)), key=lambda number: (chunks[number][0] + 1) * spans[number])
    places = itertools.cycle(itertools.product(soonest, range(degree)))
    for number, part in itertools.islice(places, extra):
        chunks[number][part] += 1
    return [tuple(parts) for parts in chunks]


def _fits(
    machines: Machines,
    training: Training,
    groups: Sequence[Sequence[int]],
    size: int,
    chunks: Sequence[tuple[int, ...]],
    kept: Sequence[int],
) -> bool:
    """Return whether each group's smallest GPU holds two ministages' weights, its shares and three inputs."""
    rows = size * training.sequence * training.hidden * _WEIGHT
    for number, parts in zip(kept, chunks, strict=True):
        group = groups[number]
        held = max([parts[0], *(a + b for a, b in itertools.pairwise(parts))])
        shared = _WEIGHT * (sum(parts) - held) + _STATE * sum(parts)
        needed = training.layer_params * (_WEIGHT * held + shared / len(group)) + 3 * rows
        if needed / _GIB + _RESERVED > min(machines.memory[machines.kinds[gpu]] for gpu in group):
            return False
    return True


def _milliseconds(own: Sequence[_Stage], chunks: Sequence[tuple[int, ...]], groups: int) -> float:
    """Return Zorse's estimate of an iteration: filling, the busiest group, and draining."""
    stages = [
        (own[number], parts[part]) for part in range(len(chunks[0])) for number, parts in enumerate(chunks)
    ]
    total = 0.0
    for place, (stage, count) in enumerate(stages[: groups + 1]):
        slowest = max(time.forward for time in stage.layer)
        total += count * (max(slowest, stage.gather) if place == 0 else slowest)
        total += stage.sends[1] if place < groups else 0.0
    for place, (stage, count) in enumerate(stages[::-1][: groups + 1]):
        slowest = max(time.total for time in stage.layer)
        total += count * (max(slowest, stage.scatter) if place == 0 else slowest)
        total += stage.sends[0] if place < groups else 0.0
    busiest = 0.0
    for stage, parts in zip(own, chunks, strict=True):
        send, spent = max(stage.sends), 0.0
        shares = list(zip(stage.layer, stage.micro_batches, strict=True))
        for part, count in enumerate(parts):
            there = max(max(time.forward * count, send) * (many - (part == 0)) for time, many in shares)
            back = max(max(time.total * count, send) * many for time, many in shares)
            spent += max(there, stage.gather * count) + max(back, (stage.gather + stage.scatter) * count)
        busiest = max(busiest, spent)
    return total + busiest
