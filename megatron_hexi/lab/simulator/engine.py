"""The event loop: units work through their programs, transfers cross the network.

Each unit does one thing at a time, and has one wire: its batches travel one after the other in the order in
which it posted them. A message starts when both ends have reached it, and its bytes flow a route's latency
later. Events of one instant are handled together before links are shared again.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.lab.simulator.fair_network import CLOSE, FairNetwork
from megatron_hexi.lab.simulator.routes import RouteTable
from megatron_hexi.lab.simulator.simulation import Lane
from megatron_hexi.lab.simulator.unit_program import (
    POINTS,
    Compute,
    Mark,
    PostBatch,
    StageProgram,
    Sum,
    UnitBatch,
)

Progress = Callable[[int, int], None]

#: Kinds of events, in the order in which those of one instant are handled.
_GO_ON, _FLOW, _ARRIVE = range(3)
_REPORTS = 100


class Activity(NamedTuple):
    """An activity on one of a unit's lanes; on ``network`` the kind is a batch's phase."""

    unit: int
    lane: Lane
    kind: str
    name: str
    lap: int
    start: float
    end: float


class Waiting(NamedTuple):
    """A unit's time without work, and the batch that it waited for (``None``: the all-reduce of the unit)."""

    unit: int
    lap: int
    batch: UnitBatch | None
    start: float
    end: float


@dataclass(eq=False)
class Log:
    """The events of a replay.

    Args:
        marks: time at which each unit passed each point of each layer pass, [passes, points, U].
        left: start of each message, [M].
        arrived: arrival of each message, [M].
        most_at_once: the most transfers that shared each link at a time.
        activities: work and batches, in the order in which they ended.
    """

    marks: Floats
    left: Floats
    arrived: Floats
    most_at_once: list[int]
    activities: list[Activity] = field(default_factory=list)
    waits: list[Waiting] = field(default_factory=list)
    end: float = 0.0


class Engine:
    """The execution of a program on the network."""

    def __init__(self, program: StageProgram, table: RouteTable, progress: Progress | None = None) -> None:
        units = len(program.units)
        self._program = program
        self._network = FairNetwork(table, program.route, program.size)
        self._latency: list[float] = table.latency[program.route].tolist()
        self._progress = progress
        self._total = sum(map(len, program.units)) + len(program.size)
        self._done = 0
        self._events: list[tuple[float, int, int]] = []
        self._place = [0] * units
        # All-to-alls and the exchange have separate communicators, so they do not wait for each other.
        self._wires: list[dict[str, deque[UnitBatch]]] = [defaultdict(deque) for _ in range(units)]
        self._awaited: list[tuple[UnitBatch, float] | None] = [None] * units
        self._lap = [0] * units
        self._ends_there = [0] * len(program.size)
        never = np.full(len(program.size), np.inf)
        marks = np.zeros((len(program.laps), len(POINTS), units))
        self._log = Log(marks, never, never.copy(), self._network.most_at_once)

    def run(self) -> Log:
        """Run from the first instruction to the last."""
        events = self._events
        now = 0.0
        for unit in range(len(self._program.units)):
            self._go_on(unit, now)
        self._settle(now)
        reported = 0
        while events:
            now = events[0][0]
            # Times that differ only by rounding are the same instant.
            while events and events[0][0] <= now * (1 + CLOSE):
                _, kind, number = heapq.heappop(events)
                if kind == _GO_ON:
                    self._go_on(number, now)
                elif kind == _FLOW:
                    self._network.begin(number, now)
                else:
                    for message in self._network.arrived(number, now):
                        self._arrive(message, now)
            self._settle(now)
            if self._progress is not None and self._done * _REPORTS >= (reported + 1) * self._total:
                reported = self._done * _REPORTS // self._total
                self._progress(self._done, self._total)
        waiting = [unit for unit, place in enumerate(self._place) if place < len(self._program.units[unit])]
        assert not waiting, f"units {waiting} wait for ever"
        self._log.end = now
        return self._log

    def _push(self, time: float, kind: int, number: int) -> None:
        heapq.heappush(self._events, (time, kind, number))

    def _settle(self, now: float) -> None:
        for time, part in self._network.settle(now):
            self._push(time, _ARRIVE, part)

    def _go_on(self, unit: int, now: float) -> None:
        """Run a unit's program until an instruction takes time."""
        program = self._program.units[unit]
        while self._place[unit] < len(program):
            step = program[self._place[unit]]
            self._place[unit] += 1
            self._done += 1
            if isinstance(step, (Compute, Sum)):
                end, lap = now + step.seconds, self._lap[unit]
                if isinstance(step, Compute):
                    activity = Activity(unit, "compute", step.kind, step.name, lap, now, end)
                else:
                    activity = Activity(unit, "network", "tensor_parallel", "sums", lap, now, end)
                    self._log.waits.append(Waiting(unit, lap, None, now, end))
                self._log.activities.append(activity)
                self._push(end, _GO_ON, unit)
                return
            if isinstance(step, Mark):
                self._log.marks[step.lap, step.point, unit] = now
                self._lap[unit] = step.lap + (step.point == len(POINTS) - 1)
            elif isinstance(step, PostBatch):
                wire = self._wires[unit][step.batch.phase]
                wire.append(step.batch)
                if len(wire) == 1:
                    self._open(step.batch, now)
            elif step.batch.left:
                self._awaited[unit] = step.batch, now
                return

    def _open(self, batch: UnitBatch, now: float) -> None:
        """Make a batch the next on its wire; messages that the other end has reached start."""
        for message in batch.messages:
            self._ends_there[message] += 1
            if self._ends_there[message] == 2:
                self._leave(message, now)

    def _leave(self, message: int, now: float) -> None:
        self._log.left[message] = now
        for batch in self._program.batches[message]:
            if batch.began < 0:
                batch.began = now
        latency = self._latency[message]
        if latency:
            self._push(now + latency, _FLOW, message)
        else:
            self._network.begin(message, now)

    def _arrive(self, message: int, now: float) -> None:
        self._log.arrived[message] = now
        self._done += 1
        for batch in self._program.batches[message]:
            batch.left -= 1
            if not batch.left:
                self._finish(batch, now)

    def _finish(self, batch: UnitBatch, now: float) -> None:
        unit = batch.unit
        batch.ended = now
        self._log.activities.append(
            Activity(unit, "network", batch.phase, batch.name, batch.lap, batch.began, now)
        )
        wire = self._wires[unit][batch.phase]
        wire.popleft()
        if wire:
            self._open(wire[0], now)
        awaited = self._awaited[unit]
        if awaited is not None and awaited[0] is batch:
            self._awaited[unit] = None
            self._log.waits.append(Waiting(unit, batch.lap, batch, awaited[1], now))
            self._go_on(unit, now)
