"""Replay of some layers of one kind, forward and backward, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.experts import ExpertsOnRanks
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost
from megatron_hexi.lab.simulator.engine import Engine, Log, Progress
from megatron_hexi.lab.simulator.routes import Routes, RouteTable
from megatron_hexi.lab.simulator.unit_program import (
    FINISH,
    LayerPass,
    SectionWork,
    StageProgram,
    build_program,
)
from megatron_hexi.lab.simulator.work import expert_traffic, layer_work
from megatron_hexi.models import Job

#: Least number of layers that are replayed forward and backward: all units begin the first together, the
#: other two show the steady state.
LEAST_LAYERS = 3
#: More layers are replayed up to this total of messages, which take a few tenths of a second.
MOST_MESSAGES = 5_000


@dataclass(frozen=True, eq=False)
class Replay:
    """The replay of units that meet in some layers."""

    program: StageProgram
    table: RouteTable
    log: Log
    layers: int

    @property
    def laps(self) -> tuple[LayerPass, ...]:
        """The layer passes, in order."""
        return self.program.laps

    @cached_property
    def exposed(self) -> Floats:
        """Seconds in which a unit waits while its own messages are in flight, [passes, U].

        A unit that waits while none of its messages is in flight is idle.
        """
        seconds = np.zeros((len(self.laps), len(self.program.units)))
        times = self._under_way
        place = [0] * seconds.shape[1]
        for wait in self.log.waits:
            if wait.batch is None:
                seconds[wait.lap, wait.unit] += wait.end - wait.start
                continue
            unit_times, number = times[wait.unit], place[wait.unit]
            while number < len(unit_times) and unit_times[number][1] < wait.end:
                overlap = min(unit_times[number][2], wait.end) - max(unit_times[number][1], wait.start)
                seconds[wait.lap, wait.unit] += max(0.0, overlap)
                if unit_times[number][2] > wait.end:
                    break
                number += 1
            place[wait.unit] = number
        return seconds

    @cached_property
    def wire(self) -> Floats:
        """Seconds in which any of a unit's messages is in flight, [passes, U]."""
        seconds = np.zeros((len(self.laps), len(self.program.units)))
        for unit, times in enumerate(self._under_way):
            for lap, start, stop in times:
                seconds[lap, unit] += stop - start
        return seconds

    @cached_property
    def _under_way(self) -> list[list[tuple[int, float, float]]]:
        """The intervals of each unit with messages in flight: (layer pass, start, end), in order."""
        program, log = self.program, self.log
        units = np.concatenate([program.src, program.dst])
        left, arrived = np.tile(log.left, 2), np.tile(log.arrived, 2)
        laps = np.tile(program.pass_numbers, 2)
        order = np.argsort(left, kind="stable")
        columns = (values[order].tolist() for values in (units, laps, left, arrived))
        times: list[list[tuple[int, float, float]]] = [[] for _ in program.units]
        for unit, lap, start, stop in zip(*columns, strict=True):
            unit_times = times[unit]
            if unit_times and unit_times[-1][0] == lap and start <= unit_times[-1][2]:
                unit_times[-1] = lap, unit_times[-1][1], max(unit_times[-1][2], stop)
            else:
                unit_times.append((lap, start, stop))
        return times


@dataclass(frozen=True, eq=False)
class SectionReplay:
    """The part of a section's units in a replay.

    Args:
        whole: the replay, in which other sections may have taken part.
        units: their place among all units of the replay.
    """

    whole: Replay
    kind: int
    plan: PlanArrays
    units: slice

    @property
    def laps(self) -> tuple[LayerPass, ...]:
        """The layer passes, in order."""
        return self.whole.laps

    @property
    def marks(self) -> Floats:
        """Time at which each unit passed each point of each layer pass, [passes, points, U]."""
        return self.whole.log.marks[:, :, self.units]

    @property
    def exposed(self) -> Floats:
        """Seconds in which each unit waits while its own messages are in flight, [passes, U]."""
        return self.whole.exposed[:, self.units]

    @property
    def wire(self) -> Floats:
        """Seconds in which any of a unit's messages is in flight, [passes, U]."""
        return self.whole.wire[:, self.units]

    def durations(self) -> Floats:
        """Return each pass's seconds, from the last unit's end of the pass before, [passes, replicas]."""
        finish = self.marks[:, FINISH]
        replicas = int(self.plan.replica[-1]) + 1
        last = [finish[:, self.plan.unit_replica == replica].max(axis=1) for replica in range(replicas)]
        return np.diff(np.array(last), axis=1, prepend=0.0).T


def replay_layers(
    sections: Sequence[Section],
    costs: Sequence[StageCost],
    experts: Sequence[ExpertsOnRanks | None],
    kind: int,
    cluster: Cluster,
    progress: Progress | None = None,
    layers: int | None = None,
) -> list[SectionReplay]:
    """Replay a micro-batch through some layers of one kind, and back.

    Args:
        sections: the units: of one section, or of all that may exchange tokens with experts.
        experts: experts of their units; ``None``: layers of this kind have none.
        kind: number of the kind among the model's.
        layers: number of layers; ``None``: `LEAST_LAYERS`, or more up to `MOST_MESSAGES`.

    Returns:
        For each section, the replay of its units.
    """
    works = [_section_work(section, cost, kind) for section, cost in zip(sections, costs, strict=True)]
    traffic = expert_traffic(sections, experts)
    counts = [
        int(count)
        for section in sections
        for count in section.by_domain(section.parts.of_kinds(section.job.model)[kind].layers)
        if count
    ] or [1]
    job = sections[0].job
    if layers is None:
        messages = sum(work.layer.messages("core_attn" in job.again) for work in works)
        messages += sum(2 * len(sent.messages.src) * (2 + ("moe" in job.again)) for sent in traffic)
        layers = min(*counts, max(LEAST_LAYERS, MOST_MESSAGES // max(1, messages)))
    # The loss follows the model's last layer.
    has_logits = kind == job.model.kind_of_layers[-1] and any(
        np.any(section.parts.is_last) for section in sections
    )
    laps = layer_passes(layers, max(counts), job, has_logits)
    routes = Routes(cluster)
    program = build_program(works, laps, routes, traffic)
    table = routes.table()
    whole = Replay(program, table, Engine(program, table, progress).run(), layers)
    stops = np.cumsum([len(work.gpus) for work in works]).tolist()
    return [
        SectionReplay(whole, kind, section.arrays, slice(stop - len(work.gpus), stop))
        for section, work, stop in zip(sections, works, stops, strict=True)
    ]


def layer_passes(layers: int, most: int, job: Job, has_logits: bool) -> list[LayerPass]:
    """Return the passes to replay: layers forward, the logits if there are any, and layers backward.

    Backward passes recompute as the job says.

    Args:
        most: number of layers of the longest stage, whose last ones are replayed backward.
    """
    laps = [LayerPass("forward", layer) for layer in range(layers)]
    if has_logits:
        laps.append(LayerPass("logits", layers - 1))
    for layer in reversed(range(most - layers, most)):
        if job.again:
            laps.append(LayerPass("again", layer, job.again))
        laps.append(LayerPass("backward", layer))
    return laps


def _section_work(section: Section, cost: StageCost, kind: int) -> SectionWork:
    job, stage = section.job.kinds[kind], section.placement.stage
    return SectionWork(
        layer=layer_work(section.arrays, job, stage, cost.kinds[kind]),
        window=section.window,
        logits=cost.last.busy,
        logits_sums=cost.last.sums.backward,
        gpus=stage.gpus,
        width=job.tensor_parallel,
    )


def last_laps(laps: Sequence[LayerPass], way: str) -> list[int]:
    """Return the last two passes of one direction, which stand for layers that are not replayed."""
    return [number for number, lap in enumerate(laps) if lap.way == way][-2:]
