"""Ministages: how long the stages of a replica take where they pass all micro-batches in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.phases import Phases
from megatron_hexi.mesh import MinistagePass, ministage_passes


@dataclass(frozen=True, eq=False)
class Passing:
    """Transfers of a stage's units for each of its ministages, seconds, [ministages] each.

    Args:
        gathers: weights from the units that keep their shares.
        sums: gradients to the units that own them.
        copies_in: weights from host memory.
        copies_out: gradients to host memory.
        rows: of a micro-batch's rows to host memory, or back.
    """

    gathers: Floats
    sums: Floats
    copies_in: Floats
    copies_out: Floats
    rows: float = 0.0

    @classmethod
    def nothing(cls, ministages: int) -> Passing:
        """No transfers: all weights and gradients stay on the device."""
        none = np.zeros(ministages)
        return cls(none, none, none, none)

    def without_host(self) -> Passing:
        """The transfers without those to and from host memory."""
        return replace(self, copies_in=0 * self.copies_in, copies_out=0 * self.copies_out, rows=0.0)

    @property
    def is_on_host(self) -> bool:
        """Whether anything comes from host memory, or goes there."""
        return self.rows > 0 or bool(self.copies_in.any() or self.copies_out.any())

    @property
    def fetches(self) -> Floats:
        """Seconds until the weights are on the device."""
        return self.copies_in + self.gathers

    @property
    def leaves(self) -> Floats:
        """Seconds until the gradients have left the device."""
        return self.sums + self.copies_out


@dataclass(frozen=True)
class Lane:
    """Units that work independently of the others of a stage.

    They are a domain that takes whole micro-batches, or all domains that share each one.

    Args:
        takes: the micro-batches that it takes, ascending.
        phases: where its time of one goes, in all ministages.
        forward_s: of that, one forward pass of all layers.
    """

    takes: tuple[int, ...]
    phases: Phases
    forward_s: float

    @property
    def work(self) -> Phases:
        """Seconds of its work in an iteration, by phase."""
        return self.phases * len(self.takes)


@dataclass(frozen=True, eq=False)
class MinistagePipeline:
    """The stages of one replica that runs in ministages.

    Borders are those between neighbours, and with several stages that from the last to the first.

    Args:
        lanes: of each stage; together they take each micro-batch once.
        there: seconds that a micro-batch's activations are under way over each border, [borders,
            micro-batches].
        back: the same of gradients.
        parts: of each stage's layers, the part that each ministage has, [p, ministages].
        passing: of each stage.
    """

    lanes: tuple[tuple[Lane, ...], ...]
    there: Floats
    back: Floats
    parts: Floats
    passing: tuple[Passing, ...]

    @property
    def stages(self) -> tuple[Phases, ...]:
        """Phases of a micro-batch in each stage, on its slowest lane."""
        return tuple(
            max((lane.phases for lane in lanes), key=lambda phases: phases.total) for lanes in self.lanes
        )

    @property
    def busiest(self) -> Phases:
        """The work of the lane that has most of it."""
        return max((lane.work for lanes in self.lanes for lane in lanes), key=lambda work: work.total)

    @property
    def phases(self) -> Phases:
        """Phases of the replica's time: the busiest lane's work, its waits for others, and for weights."""
        return self.busiest + self.waits(MinistagePipeline.seconds)

    def waits(self, seconds_of: SecondsOf) -> Phases:
        """Time of a replica beyond the work of its busiest lane.

        Args:
            seconds_of: a pipeline's seconds; asked of this one, and of it without what passes.
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
        """Yield stages and passes, each behind the pass whose rows it needs."""
        depth, count = self.parts.shape
        own = [iter(ministage_passes(count, gives_loss=stage == depth - 1)) for stage in range(depth)]
        forward = [(stage, number) for number in range(count) for stage in range(depth)]
        # The last of these turns round.
        for stage, _ in (*forward, *reversed(forward[:-1])):
            yield stage, next(own[stage])

    def step_s(self, stage: int, lane: Lane, sweep: MinistagePass) -> float:
        """Seconds of a micro-batch in a sweep; all but the turn run forward once more before the backward."""
        part, ahead = float(self.parts[stage][sweep.ministage]), lane.forward_s
        if sweep.way == "forward":
            return part * ahead
        phases, again = lane.phases, 1.0
        if stage == len(self.lanes) - 1:
            again -= float(self.parts[stage][-1])
        back = phases.total - phases.logits - (1 + again) * ahead
        return part * (ahead + back) + (phases.logits if sweep.way == "turn" else 0.0)

    def rows_s(self, stage: int, sweep: MinistagePass) -> float:
        """Seconds in which the rows that entered for a micro-batch go to host memory, or come back."""
        enter = sweep.way != "turn" and (stage, sweep.ministage) != (0, 0)
        return self.passing[stage].rows if enter else 0.0

    def border_s(self, stage: int, sweep: MinistagePass) -> Floats:
        """Seconds that what leaves a stage after a sweep is under way, [micro-batches]."""
        ways, number = (self.there, stage) if sweep.way == "forward" else (self.back, stage - 1)
        if sweep.way == "backward":
            number %= len(self.lanes)
        found: Floats = ways[number] if 0 <= number < len(ways) else np.zeros(ways.shape[1])
        return found

    def posts_ahead(self, stage: int, other: int) -> bool:
        """Whether a stage posts the next receive when a micro-batch starts, not when it ends.

        Stages whose domains take whole micro-batches post it at the end.
        """
        return len(self.lanes[stage]) == len(self.lanes[other]) == 1

    def seconds(self) -> float:
        """From the first micro-batch's entry until all gradients are with their owners.

        Each stage works in order. While a ministage runs, the weights of the next one come; its gradients
        leave while the next one runs, and are away before that one's leave (runtime/passing_buckets.py). Both
        go one after the other. Rows travel once they are computed and the other side has posted the receive:
        at the sweep's begin for the first micro-batch, when it takes up the one before for another; beside a
        stage whose micro-batches are dealt when it is done with that one. To and from host memory they go one
        micro-batch behind, or ahead.
        """
        clocks = [_Clock(*own) for own in zip(self.lanes, self.passing, strict=True)]
        # Lists: sums of numpy's own numbers are slower.
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
    """One stage: when its lanes are free, and what travels beside their work, which all take part in.

    Args:
        lanes: of the stage.
        passing: what travels.
    """

    def __init__(self, lanes: Sequence[Lane], passing: Passing) -> None:
        self.passing = passing
        self.free = [0.0 for _ in lanes]
        self.left = self._wire = 0.0
        self._here: dict[int, float] = {}

    def begin(self, sweep: MinistagePass) -> None:
        """Have the weights of a sweep here, and those of the next one on their way."""
        self._here = {number: time for number, time in self._here.items() if number in sweep.weights}
        for number in sweep.weights:
            if number not in self._here:
                self._wire = max(self._wire, *self.free) + float(self.passing.fetches[number])
                self._here[number] = self._wire
        self._wait_for(self._here[sweep.ministage])

    def end(self, sweep: MinistagePass) -> None:
        """Let its gradients leave, after those of the sweep before."""
        if sweep.is_backward:
            self._wait_for(self.left)
            self._wire = max(self._wire, *self.free) + float(self.passing.leaves[sweep.ministage])
            self.left = self._wire

    def _wait_for(self, time: float) -> None:
        self.free = [max(free, time) for free in self.free]


#: Seconds of a replica in ministages, by a model of it.
SecondsOf = Callable[[MinistagePipeline], float]
