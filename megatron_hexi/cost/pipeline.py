"""Seconds of the stages of a replica, from begin and end of each of their passes.

A stage runs its passes in the order of `mesh.pipeline_order`, one after the other in each lane. Rows travel
once they are computed and the receive is posted: when the receiver starts the pass that received before in
this direction, and for the first rows when it comes to need them. Where ministages run in turn, each has
first rows, and if domains of either stage take whole micro-batches, no receive is posted ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.lanes import Lane, Passing
from megatron_hexi.cost.period import phases_of_1f1b
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.plain_passes import WAYS, pass_order, plain_times
from megatron_hexi.mesh import ROWS_ON_DEVICE, PipelineStep, StageRun, Way, pipeline_runs


class PassSpan(NamedTuple):
    """Begin and end of a pass, in seconds of the iteration.

    Args:
        way: ``encoder``: the part of a pass in which a first stage encodes images, where that is apart.
        lane: number among the stage's lanes.
    """

    stage: int
    way: Way | Literal["encoder"]
    micro_batch: int
    chunk: int
    lane: int
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The p stages of one replica, in one of the orders of `mesh.pipeline_order`.

    There is a border between each stage and the next, and from the last stage to the first where the stages
    run several ministages, or chunks.

    Args:
        lanes: lanes of each stage, [p]; together they take each micro-batch once.
        there: seconds that a micro-batch's activations are in transit over each border, [borders,
            micro-batches].
        back: seconds that its gradients are in transit over each border, of the same shape.
        parts: part of a stage's work in layers that each ministage or chunk has, [p, ministages].
        passing: transfers of each stage's weights, gradients and rows where ministages run in turn, [p];
            ``None``: 1F1B, interleaved if there are several.
        posts_ahead: whether a stage posts a receive when the pass before it in its direction starts; else
            when that has ended, as in Megatron's interleaved schedule.
        weights: seconds of the passes of each micro-batch, relative to those of its lane; ``None``: all are
            alike.
    """

    lanes: tuple[tuple[Lane, ...], ...]
    there: Floats
    back: Floats
    parts: Floats
    passing: tuple[Passing, ...] | None = None
    posts_ahead: bool = True
    weights: tuple[float, ...] | None = None

    @property
    def stage_phases(self) -> tuple[Phases, ...]:
        """Seconds of a micro-batch by phase in the slowest lane of each stage, [p]."""
        return tuple(
            max((lane.phases for lane in lanes), key=lambda phases: phases.total) for lanes in self.lanes
        )

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return sum(len(lane.takes) for lane in self.lanes[0])

    @property
    def is_1f1b(self) -> bool:
        """Whether stages run 1F1B of micro-batches that are alike, with all of their layers in one pass."""
        return self.passing is None and self.parts.shape[1] == 1 and self.weights is None

    @property
    def is_plain(self) -> bool:
        """Whether each stage has one lane and no transfers of its own, so that passes wait for rows only."""
        return self.passing is None and all(len(lanes) == 1 for lanes in self.lanes)

    @property
    def phases(self) -> Phases:
        """Seconds of the replica by phase; for 1F1B in closed form, which is as fast as a search needs."""
        if not self.is_1f1b:
            return self.phases_of_passes
        return phases_of_1f1b(self.stage_phases, self.there[:, 0], self.back[:, 0], self.micro_batches)

    @property
    def phases_of_passes(self) -> Phases:
        """Seconds of the replica by phase, pass by pass: the work of the busiest lane, and its waits."""
        lanes = (lane for lanes in self.lanes for lane in lanes)
        work = max((self._work(lane) for lane in lanes), key=lambda work: work.total)
        near = still = here = self.seconds()
        if self.passing is None:
            if self.there.any() or self.back.any():
                still = replace(self, there=0 * self.there, back=0 * self.back).seconds()
            return work + Phases(bubble=max(0.0, still - work.total), pipeline=here - still)
        if any(one.is_on_host for one in self.passing):
            on_device = tuple(one.without_host() for one in self.passing)
            near = still = replace(self, passing=on_device).seconds()
        if any(one.gathers.any() or one.sums.any() for one in self.passing):
            nothing = tuple(Passing.nothing(len(one.sums)) for one in self.passing)
            still = replace(self, passing=nothing).seconds()
        bubble = max(0.0, still - work.total)
        return work + Phases(bubble=bubble, gradients=near - still, offload=here - near)

    def _work(self, lane: Lane) -> Phases:
        if self.weights is None:
            return lane.work
        return lane.phases * sum(self.weights[micro_batch] for micro_batch in lane.takes)

    def seconds(self) -> float:
        """Return the seconds from the first pass until all gradients are with their owners."""
        return PassTimes(self).end_s

    def spans(self) -> list[PassSpan]:
        """Return begin and end of all passes."""
        return PassTimes(self).spans()

    def with_stage_phases(self, phases: Sequence[Phases]) -> Pipeline:
        """Return the pipeline with other seconds of a micro-batch in its stages of one lane each."""
        lanes = ((replace(lane, phases=one),) for (lane,), one in zip(self.lanes, phases, strict=True))
        return replace(self, lanes=tuple(lanes))

    def pass_s(self, stage: int, lane: Lane, way: Way, ministage: int) -> float:
        """Return the seconds of a pass; the logits belong to the backward pass of the model's last ministage.

        Where ministages run in turn, a backward pass includes a forward pass, except the last ministage's.
        """
        part = float(self.parts[stage][ministage])
        if way == "forward":
            return part * lane.forward_s
        phases, again, is_last = lane.phases, 0.0, stage == len(self.lanes) - 1
        if self.passing is not None:
            again = 1.0 - is_last * float(self.parts[stage][-1])
        seconds = phases.total - phases.logits - (1 + again) * lane.forward_s
        if is_last and ministage == self.parts.shape[1] - 1:
            return part * seconds + phases.logits
        return part * (seconds + (self.passing is not None) * lane.forward_s)


class PassTimes:
    """Begin and end of all passes of a replica.

    Args:
        pipeline: the stages of the replica.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        depth, count = pipeline.parts.shape
        self._clocks = [_StageClock(pipeline, stage) for stage in range(depth)]
        if pipeline.is_plain:
            order = pass_order(depth, pipeline.micro_batches, count)
            work = np.array([clock.work[way][0] for clock in self._clocks for way in WAYS])
            travel = np.array([clock.travel[way] for clock in self._clocks for way in WAYS])
            seconds = work[order.receiver, order.chunk]
            if pipeline.weights is not None:
                seconds = seconds * np.array(pipeline.weights)[order.micro_batch]
            ways = travel[order.receiver, order.micro_batch]
            self._passes = order.passes
            self._times = plain_times(order, seconds, ways, posts_ahead=pipeline.posts_ahead)
            self.end_s = max(end for _, end in self._times)
            return
        runs = pipeline_runs(depth, pipeline.micro_batches, count, in_turn=pipeline.passing is not None)
        times = self._times = list[tuple[float, float]]()
        for run, inputs in runs:
            clock = self._clocks[run.stage]
            clock.enter(run)
            for step, source in zip(run.steps, inputs, strict=True):
                times.append(clock.run(step, None if source is None else times[source][1]))
            clock.leave(run)
        self._passes = lambda: [(run.stage, step) for run, _ in runs for step in run.steps]
        #: When the last pass and the last transfer have ended.
        self.end_s = max(clock.end_s for clock in self._clocks)

    def spans(self) -> list[PassSpan]:
        """Return the passes by stage and begin."""
        found = (
            PassSpan(stage, *step, self._clocks[stage].lane_of[step.micro_batch], *times)
            for (stage, step), times in zip(self._passes(), self._times, strict=True)
        )
        return sorted(found, key=lambda span: (span.stage, span.start_s))


class _StageClock:
    """The clock of one stage: when its lanes are free, and when its transfers end.

    While a ministage runs in turn, the next one's weights arrive. Its own gradients leave while the next one
    runs, before that one's gradients (runtime/passing_buckets.py). Collectives, in which all lanes take part,
    run one after the other; so do each lane's copies from host memory, and each lane's copies to it.
    """

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        depth, count = pipeline.parts.shape
        lanes, borders = pipeline.lanes[stage], len(pipeline.there)
        self.lane_of = {taken: lane for lane, one in enumerate(lanes) for taken in one.takes}
        self._is_first = stage == 0
        self._weights = pipeline.weights or (1.0,) * pipeline.micro_batches
        self._passing = None if pipeline.passing is None else pipeline.passing[stage]
        none = [0.0] * pipeline.micro_batches
        self.work: dict[Way, list[list[float]]] = {}
        self.travel: dict[Way, list[float]] = {}
        self._posts_ahead: dict[Way, bool] = {}
        sources: tuple[tuple[Way, int, Floats, int], ...] = (
            ("forward", stage - 1, pipeline.there, stage - 1),
            ("backward", (stage + 1) % depth, pipeline.back, stage),
        )
        for way, other, times, border in sources:
            self.work[way] = [
                [pipeline.pass_s(stage, lane, way, number) for number in range(count)] for lane in lanes
            ]
            # What crosses no border is never asked for.
            self.travel[way] = times[border % borders].tolist() if borders else none
            self._posts_ahead[way] = pipeline.posts_ahead and len(lanes) == len(pipeline.lanes[other]) == 1
        #: When lanes posted the receive of their next rows, by way and lane, if before they need them.
        self._posted: dict[tuple[Way, int], float] = {}
        self._wire = self._left = 0.0
        self._free, self._inward, self._outward = ([0.0] * len(lanes) for _ in range(3))
        self._here: dict[int, float] = {}
        #: Seconds of copying a micro-batch's rows in this run; begins of passes, and ends of copies, by lane.
        self._rows_s = 0.0
        self._begun: list[list[float]] = [[] for _ in lanes]
        self._copied: list[list[float]] = [[] for _ in lanes]

    @property
    def end_s(self) -> float:
        """Time at which all passes, collectives and copies of the stage have ended, s."""
        return max(*self._free, *self._inward, *self._outward, self._wire, self._left)

    def enter(self, run: StageRun) -> None:
        """Wait for the weights of a run, and start to fetch those of the next one."""
        passing, sweep = self._passing, run.in_turn
        if passing is None or sweep is None:
            return
        start, lanes = self._free, range(len(self._free))
        self._posted = {(way, lane): start[lane] for way in self.travel for lane in lanes}
        self._begun, self._copied = [[one] for one in start], [[] for _ in lanes]
        has_entry = sweep.way != "turn" and not (self._is_first and sweep.ministage == 0)
        self._rows_s = passing.rows * has_entry
        self._here = {number: time for number, time in self._here.items() if number in sweep.weights}
        for number in sweep.weights:
            if number not in self._here:
                copy_s = float(passing.copies_in[number])
                self._inward = [max(both) + copy_s for both in zip(self._inward, start, strict=True)]
                self._wire = max(self._wire, *self._inward) + float(passing.gathers[number])
                self._here[number] = self._wire
        self._wait_for(self._here[sweep.ministage])

    def run(self, step: PipelineStep, ready: float | None) -> tuple[float, float]:
        """Run a pass and return its begin and end; `ready`: when its input is ready, ``None``: always."""
        way, lane = step.way, self.lane_of[step.micro_batch]
        begin = free = self._free[lane]
        if ready is not None:
            asked = self._posted.pop((way, lane), free)
            begin = max(free, max(ready, asked) + self.travel[way][step.micro_batch])
        if self._rows_s:
            begin = self._with_rows(way, lane, begin)
        seconds = self.work[way][lane][step.chunk] * self._weights[step.micro_batch]
        end = self._free[lane] = begin + seconds
        if ready is not None and (self._posts_ahead[way] or self._passing is None):
            self._posted[way, lane] = begin if self._posts_ahead[way] else end
        return begin, end

    def leave(self, run: StageRun) -> None:
        """Send the gradients of a run to their owners, after those of the run before have left."""
        passing, sweep = self._passing, run.in_turn
        if passing is None or sweep is None or not sweep.is_backward:
            return
        self._wait_for(self._left)
        self._wire = max(self._wire, *self._free) + float(passing.sums[sweep.ministage])
        copy_s = float(passing.copies_out[sweep.ministage])
        self._outward = [max(one, self._wire) + copy_s for one in self._outward]
        self._left = max(self._outward)

    def _with_rows(self, way: Way, lane: int, begin: float) -> float:
        """Return the begin of a pass, delayed by the copies of input rows to host memory or back.

        The device holds the rows of at most `ROWS_ON_DEVICE` micro-batches at a time.
        """
        begun, copied = self._begun[lane], self._copied[lane]
        if way == "backward":
            ahead = begun[max(0, len(begun) - ROWS_ON_DEVICE + 1)]
            self._inward[lane] = max(self._inward[lane], ahead) + self._rows_s
            begin = max(begin, self._inward[lane])
        else:
            if len(copied) >= ROWS_ON_DEVICE:
                begin = max(begin, copied[-ROWS_ON_DEVICE])
            self._outward[lane] = max(self._outward[lane], begin) + self._rows_s
            copied.append(self._outward[lane])
        begun.append(begin)
        return begin

    def _wait_for(self, time: float) -> None:
        self._free = [max(free, time) for free in self._free]
