"""A graph of tasks, each of which begins as soon as all tasks before it allow."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

#: A task: its kind, the stage, the place of the pass in its order, and the number of a micro-batch, of a
#: ministage or of a lane.
Task = tuple[str, int, int, int]


@dataclass
class _TaskNode:
    """A task: seconds, number of unfinished predecessors, and successors of its end or its begin."""

    seconds: float
    waits_for: int = 0
    unlocks: list[Task] = field(default_factory=list)
    unlocks_begun: list[Task] = field(default_factory=list)


class TaskGraph:
    """Tasks with their predecessors. Each lane runs tasks in the order in which they are added."""

    def __init__(self) -> None:
        self.nodes: dict[Task, _TaskNode] = {}
        self._last: dict[tuple[str, int], Task] = {}
        self._needs: list[tuple[Task, Task, bool]] = []

    def add(
        self, task: Task, seconds: float, lane: tuple[str, int] | None, after: Iterable[Task] = ()
    ) -> None:
        """Add a task after others, which may be added later."""
        self.nodes[task] = _TaskNode(seconds)
        if lane is not None:
            if lane in self._last:
                self.need(task, self._last[lane])
            self._last[lane] = task
        for earlier in after:
            self.need(task, earlier)

    def need(self, task: Task, earlier: Task, *, begun: bool = False) -> None:
        """Let a task begin only after another has ended, or has begun."""
        self._needs.append((task, earlier, begun))

    def run(self) -> dict[Task, tuple[float, float]]:
        """Return begin and end of all tasks."""
        for task, earlier, begun in self._needs:
            node = self.nodes[earlier]
            (node.unlocks_begun if begun else node.unlocks).append(task)
            self.nodes[task].waits_for += 1
        times: dict[Task, tuple[float, float]] = {}
        number = itertools.count()
        events: list[tuple[float, int, Task]] = []

        def unlock(tasks: Iterable[Task], now: float) -> None:
            for task in tasks:
                node = self.nodes[task]
                node.waits_for -= 1
                if not node.waits_for:
                    begin(task, now)

        def begin(task: Task, now: float) -> None:
            node = self.nodes[task]
            times[task] = now, now + node.seconds
            heapq.heappush(events, (now + node.seconds, next(number), task))
            unlock(node.unlocks_begun, now)

        for task in [task for task, node in self.nodes.items() if not node.waits_for]:
            begin(task, 0.0)
        while events:
            now, _, task = heapq.heappop(events)
            unlock(self.nodes[task].unlocks, now)
        assert len(times) == len(self.nodes), "nothing waits for itself"
        return times
