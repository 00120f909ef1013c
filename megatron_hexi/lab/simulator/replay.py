"""Some layers of the stages of one section, forward and backward, event by event."""

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
from megatron_hexi.lab.simulator.program import POINTS, Lap, Program, build_program
from megatron_hexi.lab.simulator.routes import Routes, RouteTable
from megatron_hexi.lab.simulator.work import LayerWork

_FINISH = POINTS.index("finish")


@dataclass(frozen=True, eq=False)
class Replay:
    """What the units of a section did.

    Args:
        plan: what the units hold.
        program: what the units did.
        table: the routes that messages took.
        route: of each message, [M].
        log: when.
    """

    plan: PlanArrays
    program: Program
    table: RouteTable
    route: Ints
    log: Log

    @property
    def laps(self) -> tuple[Lap, ...]:
        """What was done one after the other."""
        return self.program.laps

    def durations(self) -> Floats:
        """Seconds from one lap's last unit to the next lap's, in each replica, [laps, replicas]."""
        finish = self.log.marks[:, _FINISH]
        replicas = int(self.plan.replica[-1]) + 1
        last = [finish[:, self.plan.unit_replica == replica].max(axis=1) for replica in range(replicas)]
        return np.diff(np.array(last), axis=1, prepend=0.0).T

    def exposed(self) -> Floats:
        """Seconds in which a unit waits while its own messages are under way, [laps, U].

        While none of its messages is under way a unit waits for another one, and that is idleness.
        """
        seconds = np.zeros((len(self.laps), len(self.program.units)))
        times = self._under_way()
        place = [0] * seconds.shape[1]
        for wait in self.log.waits:
            if wait.batch is None:
                seconds[wait.lap, wait.unit] += wait.end - wait.start
                continue
            own, number = times[wait.unit], place[wait.unit]
            while number < len(own) and own[number][1] < wait.end:
                overlap = min(own[number][2], wait.end) - max(own[number][1], wait.start)
                seconds[wait.lap, wait.unit] += max(0.0, overlap)
                if own[number][2] > wait.end:
                    break
                number += 1
            place[wait.unit] = number
        return seconds

    def wire(self) -> Floats:
        """Seconds in which any of a unit's messages is under way, [laps, U]."""
        seconds = np.zeros((len(self.laps), len(self.program.units)))
        for unit, times in enumerate(self._under_way()):
            for lap, start, stop in times:
                seconds[lap, unit] += stop - start
        return seconds

    def _under_way(self) -> list[list[tuple[int, float, float]]]:
        """When any message of a unit is under way: lap, start and end, in order, of each unit."""
        program, log = self.program, self.log
        units = np.concatenate([program.src, program.dst])
        left, arrived = np.tile(log.left, 2), np.tile(log.arrived, 2)
        laps = np.tile(np.array(program.set_laps, dtype=np.int64)[program.sets], 2)
        order = np.argsort(left, kind="stable")
        columns = (values[order].tolist() for values in (units, laps, left, arrived))
        times: list[list[tuple[int, float, float]]] = [[] for _ in program.units]
        for unit, lap, start, stop in zip(*columns, strict=True):
            own = times[unit]
            if own and own[-1][0] == lap and start <= own[-1][2]:
                own[-1] = lap, own[-1][1], max(own[-1][2], stop)
            else:
                own.append((lap, start, stop))
        return times

    def sent(self, received: bool = False) -> tuple[Floats, Floats]:
        """Bytes that each unit has sent (or received) in all-to-alls and in the exchange, [laps, U]."""
        program = self.program
        shape = len(self.laps), len(program.units)
        inside = np.array([kind.startswith("all-to-all") for kind in program.set_kinds], dtype=bool)
        lap = np.array(program.set_laps, dtype=np.int64)[program.sets]
        there = np.isfinite(self.log.arrived)
        counts = []
        for chosen in (inside[program.sets], ~inside[program.sets]):
            taken = chosen & there
            found = np.zeros(shape)
            np.add.at(
                found, (lap[taken], (program.dst if received else program.src)[taken]), program.size[taken]
            )
            counts.append(found)
        return counts[0], counts[1]


def replay_section(
    section: Section,
    cost: StageCost,
    work: LayerWork,
    cluster: Cluster,
    layers: int,
    progress: Progress | None = None,
) -> Replay:
    """Replay one micro-batch through the first layers of a section's stages, and backward through as many.

    Args:
        section: the units.
        cost: of their stages, for what stands at the end of them.
        work: of one layer.
        cluster: the cluster.
        layers: how many.
        progress: told how much of how much is done.
    """
    laps = section_laps(section, layers)
    program = build_program(work, laps, section.window, cost.logits, cost.logits_sum)
    routes = Routes(cluster, section.job.tensor_parallel)
    gpus = section.placement.stage.gpus
    route = routes.numbers(gpus[program.src], gpus[program.dst])
    table = routes.table()
    return Replay(section.arrays, program, table, route, Engine(program, table, route, progress).run())


def section_laps(section: Section, layers: int) -> list[Lap]:
    """Forward through some layers, the logits, and backward through as many with what is recomputed."""
    most, mode = max(section.by_domain(section.parts.layers)), section.job.mode
    laps = [Lap("forward", layer) for layer in range(layers)]
    if np.any(section.parts.is_last):
        laps.append(Lap("logits", layers - 1))
    for layer in reversed(range(most - layers, most)):
        if mode != "none":
            laps.append(Lap("again", layer, whole=mode == "full"))
        laps.append(Lap("backward", layer))
    return laps


def last_laps(laps: Sequence[Lap], way: str) -> list[int]:
    """The last two laps of a way: what goes on in layers that are not replayed."""
    return [number for number, lap in enumerate(laps) if lap.way == way][-2:]
