"""The event loop: units work through their programs, transfers cross the network.

Each unit does one thing at a time, and has one wire: its batches travel one after the other in the order in
which it posted them. A message leaves when both ends have come to it, and its bytes flow a route's latency
later. What happens at the same time is done together before links are shared anew.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.lab.simulator.network import CLOSE, FairNetwork, Meetings
from megatron_hexi.lab.simulator.program import POINTS, Batch, Compute, Mark, Post, Program, Sum, Wait
from megatron_hexi.lab.simulator.routes import RouteTable
from megatron_hexi.lab.simulator.simulation import Lane

Progress = Callable[[int, int], None]

#: Kinds of events, in the order in which those of one instant are done.
_GO_ON, _FLOW, _ARRIVE = range(3)
_REPORTS = 100


class Piece(NamedTuple):
    """Something that took time on one of a unit's lanes; on ``network`` the kind is a batch's phase."""

    unit: int
    lane: Lane
    kind: str
    name: str
    lap: int
    start: float
    end: float


class Waiting(NamedTuple):
    """A unit that had nothing to compute, and the batch (``None``: the sums) that it waited for."""

    unit: int
    lap: int
    batch: Batch | None
    start: float
    end: float


@dataclass(eq=False)
class Log:
    """What happened.

    Args:
        marks: when each unit passed each point of each lap, [laps, points, U].
        pieces: work and batches, in the order in which they ended.
        waits: time without work.
        left: when each message left, [M].
        arrived: when it had arrived, [M].
        meetings: who shared links.
        end: when all were done.
    """

    marks: Floats
    pieces: list[Piece] = field(default_factory=list)
    waits: list[Waiting] = field(default_factory=list)
    left: Floats = field(default_factory=lambda: np.zeros(0))
    arrived: Floats = field(default_factory=lambda: np.zeros(0))
    meetings: Meetings = field(default_factory=lambda: Meetings([]))
    end: float = 0.0


class Engine:
    """Carries a program out.

    Args:
        program: what the units do.
        table: routes of the messages.
        route: the route of each message, [M].
        progress: told how much of how much is done.
    """

    def __init__(
        self, program: Program, table: RouteTable, route: Ints, progress: Progress | None = None
    ) -> None:
        units = len(program.units)
        self._program = program
        self._network = FairNetwork(table, route, program.size, program.sets, program.set_kinds)
        self._latency: list[float] = table.latency[route].tolist()
        self._progress = progress
        self._total = sum(map(len, program.units)) + len(program.size)
        self._done = 0
        self._events: list[tuple[float, int, int]] = []
        self._place = [0] * units
        # All-to-alls and the exchange have communicators of their own: neither waits for the other's turn.
        self._wires: list[dict[str, deque[Batch]]] = [defaultdict(deque) for _ in range(units)]
        self._awaited: list[tuple[Wait, float] | None] = [None] * units
        self._lap = [0] * units
        self._ends_there = [0] * len(program.size)
        self._log = Log(np.zeros((len(program.laps), len(POINTS), units)))
        self._log.left = np.full(len(program.size), np.inf)
        self._log.arrived = self._log.left.copy()
        self._log.meetings = self._network.meetings

    def run(self) -> Log:
        """From the first instruction to the last."""
        events = self._events
        now = 0.0
        for unit in range(len(self._program.units)):
            self._go_on(unit, now)
        self._settle(now)
        reported = 0
        while events:
            now = events[0][0]
            # What differs by rounding only is the same instant.
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
        """Work through a unit's program until something takes time."""
        program = self._program.units[unit]
        while self._place[unit] < len(program):
            step = program[self._place[unit]]
            self._place[unit] += 1
            self._done += 1
            if isinstance(step, Compute):
                end = now + step.seconds
                lap = self._lap[unit]
                self._log.pieces.append(Piece(unit, "compute", step.kind, step.name, lap, now, end))
                self._push(end, _GO_ON, unit)
                return
            if isinstance(step, Mark):
                self._log.marks[step.lap, step.point, unit] = now
                self._lap[unit] = step.lap + (step.point == len(POINTS) - 1)
            elif isinstance(step, Post):
                wire = self._wires[unit][step.batch.phase]
                wire.append(step.batch)
                if len(wire) == 1:
                    self._open(step.batch, now)
            elif isinstance(step, Wait):
                if step.batch.left:
                    self._awaited[unit] = step, now
                    return
            elif isinstance(step, Sum):
                end = now + step.seconds
                lap = self._lap[unit]
                self._log.pieces.append(Piece(unit, "network", "tensor_parallel", "sums", lap, now, end))
                self._log.waits.append(Waiting(unit, lap, None, now, end))
                self._push(end, _GO_ON, unit)
                return

    def _open(self, batch: Batch, now: float) -> None:
        """A batch is the next on its wire; messages that the other end has come to leave."""
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

    def _finish(self, batch: Batch, now: float) -> None:
        unit = batch.unit
        batch.ended = now
        self._log.pieces.append(Piece(unit, "network", batch.phase, batch.name, batch.lap, batch.began, now))
        wire = self._wires[unit][batch.phase]
        wire.popleft()
        if wire:
            self._open(wire[0], now)
        awaited = self._awaited[unit]
        if awaited is not None and awaited[0].batch is batch:
            _, since = awaited
            self._awaited[unit] = None
            self._log.waits.append(Waiting(unit, batch.lap, batch, since, now))
            self._go_on(unit, now)
