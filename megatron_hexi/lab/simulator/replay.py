"""Replay of some layers of the stages of a section, forward and backward, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.stage import StageCost
from megatron_hexi.lab.simulator.engine import Engine, Log, Progress
from megatron_hexi.lab.simulator.routes import Routes, RouteTable
from megatron_hexi.lab.simulator.unit_program import POINTS, LayerPass, StageProgram, build_program
from megatron_hexi.lab.simulator.work import LayerWork

_FINISH = POINTS.index("finish")


@dataclass(frozen=True, eq=False)
class Replay:
    """The replay of the units of a section.

    Args:
        plan: arrays of the units.
        program: instructions of the units.
        table: the routes that messages took.
        route: route of each message, [M].
        log: events of the replay.
    """

    plan: PlanArrays
    program: StageProgram
    table: RouteTable
    route: Ints
    log: Log

    @property
    def laps(self) -> tuple[LayerPass, ...]:
        """The layer passes, in order."""
        return self.program.laps

    def durations(self) -> Floats:
        """Return seconds from a pass's last unit to the next pass's, by replica, [passes, replicas]."""
        finish = self.log.marks[:, _FINISH]
        replicas = int(self.plan.replica[-1]) + 1
        last = [finish[:, self.plan.unit_replica == replica].max(axis=1) for replica in range(replicas)]
        return np.diff(np.array(last), axis=1, prepend=0.0).T

    def exposed(self) -> Floats:
        """Return seconds in which a unit waits while its own messages are under way, [passes, U].

        A unit that waits while none of its messages is under way is idle.
        """
        seconds = np.zeros((len(self.laps), len(self.program.units)))
        times = self._under_way()
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

    def wire(self) -> Floats:
        """Return seconds in which any of a unit's messages is under way, [passes, U]."""
        seconds = np.zeros((len(self.laps), len(self.program.units)))
        for unit, times in enumerate(self._under_way()):
            for lap, start, stop in times:
                seconds[lap, unit] += stop - start
        return seconds

    def _under_way(self) -> list[list[tuple[int, float, float]]]:
        """Return for each unit when messages are under way: layer pass, start and end, in order."""
        program, log = self.program, self.log
        units = np.concatenate([program.src, program.dst])
        left, arrived = np.tile(log.left, 2), np.tile(log.arrived, 2)
        laps = np.tile(np.array(program.set_laps, dtype=np.int64)[program.sets], 2)
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

    def sent(self, received: bool = False) -> tuple[Floats, Floats]:
        """Return bytes that each unit sent (or received) in all-to-alls and in the exchange, [passes, U]."""
        program = self.program
        shape = len(self.laps), len(program.units)
        inside = np.array([kind.startswith("all-to-all") for kind in program.set_kinds], dtype=bool)
        lap = np.array(program.set_laps, dtype=np.int64)[program.sets]
        there = np.isfinite(self.log.arrived)
        counts = []
        for chosen in (inside[program.sets], ~inside[program.sets]):
            selected = chosen & there
            unit_bytes = np.zeros(shape)
            np.add.at(
                unit_bytes,
                (lap[selected], (program.dst if received else program.src)[selected]),
                program.size[selected],
            )
            counts.append(unit_bytes)
        return counts[0], counts[1]


def replay_section(
    section: Section,
    cost: StageCost,
    work: LayerWork,
    cluster: Cluster,
    layers: int,
    progress: Progress | None = None,
) -> Replay:
    """Replay a micro-batch through the first layers of a section's stages, and as many backward.

    Args:
        section: the units.
        cost: cost of their stages, for the logits.
        work: work of one layer.
        cluster: the cluster.
        layers: number of layers.
        progress: callback: receives the parts done and their total.
    """
    laps = section_laps(section, layers)
    program = build_program(work, laps, section.window, cost.logits, cost.logits_sum)
    routes = Routes(cluster, section.job.tensor_parallel)
    gpus = section.placement.stage.gpus
    route = routes.numbers(gpus[program.src], gpus[program.dst])
    table = routes.table()
    return Replay(section.arrays, program, table, route, Engine(program, table, route, progress).run())


def section_laps(section: Section, layers: int) -> list[LayerPass]:
    """Return forward passes of some layers, the logits, and as many backward passes with recomputation."""
    most, mode = max(section.by_domain(section.parts.layers)), section.job.mode
    laps = [LayerPass("forward", layer) for layer in range(layers)]
    if np.any(section.parts.is_last):
        laps.append(LayerPass("logits", layers - 1))
    for layer in reversed(range(most - layers, most)):
        if mode != "none":
            laps.append(LayerPass("again", layer, whole=mode == "full"))
        laps.append(LayerPass("backward", layer))
    return laps


def last_laps(laps: Sequence[LayerPass], way: str) -> list[int]:
    """Return the last two passes of a way, which stand for layers that are not replayed."""
    return [number for number, lap in enumerate(laps) if lap.way == way][-2:]
