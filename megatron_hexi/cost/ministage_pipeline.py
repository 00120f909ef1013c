"""Seconds of a replica whose stages run in ministages, each of which takes all micro-batches in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.phases import Phases
from megatron_hexi.mesh import MinistagePass, ministage_passes


@dataclass(frozen=True, eq=False)
class Passing:
    """Seconds of the transfers of weights, gradients and rows of a stage's ministages.

    Args:
        gathers: all-gather of each ministage's weights from the units that own shares, s, [ministages].
        sums: reduction of its gradients to the units that own them, s, [ministages].
        copies_in: copy of its weights from host memory, s, [ministages].
        copies_out: copy of its gradients to host memory, s, [ministages].
        rows: copy of a micro-batch's rows to host memory, or back, s.
    """

    gathers: Floats
    sums: Floats
    copies_in: Floats
    copies_out: Floats
    rows: float = 0.0

    @classmethod
    def nothing(cls, ministages: int) -> Passing:
        """Return transfers of 0 s: all weights and gradients stay on the device."""
        none = np.zeros(ministages)
        return cls(none, none, none, none)

    def without_host(self) -> Passing:
        """Return the transfers without those to and from host memory."""
        return replace(self, copies_in=0 * self.copies_in, copies_out=0 * self.copies_out, rows=0.0)

    @property
    def is_on_host(self) -> bool:
        """Whether anything is copied to or from host memory."""
        return self.rows > 0 or bool(self.copies_in.any() or self.copies_out.any())

    @property
    def fetches(self) -> Floats:
        """Seconds until each ministage's weights are on the device, [ministages]."""
        return self.copies_in + self.gathers

    @property
    def leaves(self) -> Floats:
        """Seconds until each ministage's gradients have left the device, [ministages]."""
        return self.sums + self.copies_out


@dataclass(frozen=True)
class Lane:
    """Units of a stage that process micro-batches independently of the stage's other units.

    A lane is one domain that takes whole micro-batches, or all domains that share each micro-batch.

    Args:
        takes: numbers of the micro-batches that it takes, ascending.
        phases: seconds of one micro-batch by phase, over all ministages.
        forward_s: seconds of one forward pass of all layers, which are part of `phases`.
    """

    takes: tuple[int, ...]
    phases: Phases
    forward_s: float

    @property
    def work(self) -> Phases:
        """Seconds of the lane's work in an iteration, by phase."""
        return self.phases * len(self.takes)


@dataclass(frozen=True, eq=False)
class MinistagePipeline:
    """The stages of one replica that runs in ministages.

    There is a border between each stage and the next, and with several stages one from the last to the first.

    Args:
        lanes: lanes of each stage, [p]; together they take each micro-batch once.
        there: seconds that a micro-batch's activations are in transit over each border, [borders,
            micro-batches].
        back: seconds that its gradients are in transit over each border, [borders, micro-batches].
        parts: part of a stage's work in layers that each ministage has, [p, ministages].
        passing: transfers of each stage's weights, gradients and rows, [p].
    """

    lanes: tuple[tuple[Lane, ...], ...]
    there: Floats
    back: Floats
    parts: Floats
    passing: tuple[Passing, ...]

    @property
    def stage_phases(self) -> tuple[Phases, ...]:
        """Seconds of a micro-batch by phase in the slowest lane of each stage, [p]."""
        return tuple(
            max((lane.phases for lane in lanes), key=lambda phases: phases.total) for lanes in self.lanes
        )

    @property
    def busiest(self) -> Phases:
        """Seconds of work in an iteration by phase, of the lane with the most."""
        return max((lane.work for lanes in self.lanes for lane in lanes), key=lambda work: work.total)

    @property
    def phases(self) -> Phases:
        """Seconds of the replica by phase: the busiest lane's work, its waits for others, and for weights."""
        return self.busiest + self.waits(MinistagePipeline.seconds)

    def waits(self, seconds_of: SecondsOf) -> Phases:
        """Return the seconds of the replica beyond the work of its busiest lane, by phase.

        Args:
            seconds_of: gives the seconds of a pipeline; called with this pipeline, with it without transfers
                to and from host memory, and with it without any transfers.
        """
        work, passing = self.busiest.total, self.passing
        near = still = here = seconds_of(self)
        if any(one.is_on_host for one in passing):
            near = still = seconds_of(replace(self, passing=tuple(one.without_host() for one in passing)))
        if any(one.gathers.any() or one.sums.any() for one in passing):
            nothing = tuple(Passing.nothing(len(one.sums)) for one in passing)
            still = seconds_of(replace(self, passing=nothing))
        return Phases(bubble=max(0.0, still - work), gradients=near - still, offload=here - near)

    def order(self) -> Iterator[tuple[int, MinistagePass]]:
        """Yield each pass of a ministage and its stage, after the pass whose rows it needs."""
        depth, count = self.parts.shape
        own = [iter(ministage_passes(count, gives_loss=stage == depth - 1)) for stage in range(depth)]
        forward = [(stage, number) for number in range(count) for stage in range(depth)]
        # The last of these is the turn: forward and backward of the ministage with the loss.
        for stage, _ in (*forward, *reversed(forward[:-1])):
            yield stage, next(own[stage])

    def step_s(self, stage: int, lane: Lane, sweep: MinistagePass) -> float:
        """Return the seconds of one micro-batch in a pass of a ministage.

        A backward pass first runs forward once more. The turn is the forward and the backward pass of the
        ministage with the loss.
        """
        part, ahead = float(self.parts[stage][sweep.ministage]), lane.forward_s
        if sweep.way == "forward":
            return part * ahead
        phases, again = lane.phases, 1.0
        if stage == len(self.lanes) - 1:
            again -= float(self.parts[stage][-1])
        back = phases.total - phases.logits - (1 + again) * ahead
        return part * (ahead + back) + (phases.logits if sweep.way == "turn" else 0.0)

    def rows_s(self, stage: int, sweep: MinistagePass) -> float:
        """Return the seconds of copying the input rows of one micro-batch to host memory, or back."""
        enter = sweep.way != "turn" and (stage, sweep.ministage) != (0, 0)
        return self.passing[stage].rows if enter else 0.0

    def border_s(self, stage: int, sweep: MinistagePass) -> Floats:
        """Return the seconds that a pass's output is in transit to the next stage, [micro-batches]."""
        ways, number = (self.there, stage) if sweep.way == "forward" else (self.back, stage - 1)
        if sweep.way == "backward":
            number %= len(self.lanes)
        found: Floats = ways[number] if 0 <= number < len(ways) else np.zeros(ways.shape[1])
        return found

    def posts_ahead(self, stage: int, other: int) -> bool:
        """Return whether a stage posts the next receive from another stage when a micro-batch starts.

        If the domains of either stage take whole micro-batches, it posts the receive when a micro-batch ends.
        """
        return len(self.lanes[stage]) == len(self.lanes[other]) == 1

    def seconds(self) -> float:
        """Return the seconds from the first micro-batch's start until all gradients are with their owners.

        Each stage runs its passes in order. While a ministage runs, the weights of the next one arrive. Its
        gradients leave while the next one runs, and have left before the gradients of the next one leave
        (runtime/passing_buckets.py). These transfers run one after the other. Rows travel once they are
        computed and the receive is posted: for the first micro-batch when the pass begins, for any other when
        the receiver starts the micro-batch before, or when it ends that one if domains of either stage take
        whole micro-batches. Copies to and from host memory run one micro-batch behind, or ahead.
        """
        clocks = [_Clock(*own) for own in zip(self.lanes, self.passing, strict=True)]
        # Lists, because sums of numpy's scalars are slower.
        sent, border, before = [0.0] * self.there.shape[1], [0.0] * self.there.shape[1], 0
        for stage, sweep in self.order():
            clock = clocks[stage]
            asked = list(clock.free)
            clock.begin(sweep)
            is_ahead = self.posts_ahead(stage, before)
            for number, lane in enumerate(self.lanes[stage]):
                free, posted = clock.free[number], asked[number]
                step = max(self.step_s(stage, lane, sweep), self.rows_s(stage, sweep))
                for micro_batch in lane.takes:
                    begun = max(free, max(sent[micro_batch], posted) + border[micro_batch])
                    sent[micro_batch] = free = begun + step
                    posted = begun if is_ahead else free
                clock.free[number] = free
            border, before = self.border_s(stage, sweep).tolist(), stage
            clock.end(sweep)
        return max(max(*clock.free, clock.left) for clock in clocks)


class _Clock:
    """The clock of one stage: when its lanes are free, and when its transfers end.

    All lanes of the stage take part in each transfer.

    Args:
        lanes: the stage's lanes.
        passing: the stage's transfers.
    """

    def __init__(self, lanes: Sequence[Lane], passing: Passing) -> None:
        self.passing = passing
        self.free = [0.0 for _ in lanes]
        self.left = self._wire = 0.0
        self._here: dict[int, float] = {}

    def begin(self, sweep: MinistagePass) -> None:
        """Wait for the weights of a pass, and start to fetch those of the next one."""
        self._here = {number: time for number, time in self._here.items() if number in sweep.weights}
        for number in sweep.weights:
            if number not in self._here:
                self._wire = max(self._wire, *self.free) + float(self.passing.fetches[number])
                self._here[number] = self._wire
        self._wait_for(self._here[sweep.ministage])

    def end(self, sweep: MinistagePass) -> None:
        """Send the gradients of a backward pass to their owners, after those of the pass before have left."""
        if sweep.is_backward:
            self._wait_for(self.left)
            self._wire = max(self._wire, *self.free) + float(self.passing.leaves[sweep.ministage])
            self.left = self._wire

    def _wait_for(self, time: float) -> None:
        self.free = [max(free, time) for free in self.free]


#: A model of the seconds of a replica in ministages.
SecondsOf = Callable[[MinistagePipeline], float]
