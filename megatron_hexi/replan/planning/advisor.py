"""``python -m megatron_hexi.replan.planning.advisor``: the planner next to rank 0 of a running job.

It reads one JSON document a line and answers each with one. The first says what is trained, where and by
which plan (`Advisor`); each of the others what ranks measured (`Advisor.advise`). It plans at a low priority,
off the training process, which imports no planner.

Changes of a rank's speed show in its history of times. A rank is held against itself only: samples are times
relative to those that its plan predicts, so that a change of plan is none of the rank, and ranks with much
work are not slow ones.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job, Model
from megatron_hexi.plan import Plan, dump_plan, plan_digest, plan_from_yaml
from megatron_hexi.plan.units import unit_rows
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.moves import Climb, layer_moves
from megatron_hexi.replan.planning.recut import recut
from megatron_hexi.yaml_file import yaml_from_text

#: Samples that must agree on a new level.
WINDOW = 5
#: Samples of a level that are kept: an old one must not hide a slow drift.
KEPT = 40
#: A change is larger than this part of the level, and than so many standard deviations of its samples.
_LEAST_CHANGE = 0.05
_DEVIATIONS = 4.0
#: The median absolute deviation of a normal distribution, in standard deviations.
_MAD = 0.6745


class RankHistory:
    """The samples of one rank since its level last changed.

    A change point is where the median of the last `WINDOW` samples lies off the median of those before by
    more than `_LEAST_CHANGE` and by more than `_DEVIATIONS` robust standard deviations (median absolute
    deviation), with all but one of them on that side. One slow iteration, or two, change nothing.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def level(self) -> float:
        """Median of the samples since the last change."""
        return median(self._samples)

    def add(self, sample: float) -> bool:
        """Add a sample.

        Returns:
            Whether it shows that the level has changed: then only the last samples are kept.
        """
        self._samples.append(sample)
        if len(self._samples) < 2 * WINDOW:
            return False
        samples = list(self._samples)
        before, latest = samples[:-WINDOW], samples[-WINDOW:]
        old, new = median(before), median(latest)
        deviation = median(abs(value - old) for value in before) / _MAD
        if abs(new - old) <= max(_LEAST_CHANGE * old, _DEVIATIONS * deviation):
            return False
        middle = (old + new) / 2
        if sum((value > middle) == (new > old) for value in latest) < WINDOW - 1:
            return False
        self._samples.clear()
        self._samples.extend(latest)
        return True


_NICE = 10
#: Intervals in which a round with moved layers must pay back its start.
_ROUND_INTERVALS = 20
#: The most plans with moved layers that are timed.
_MOST_MOVES = 200


@dataclass(frozen=True)
class Advice:
    """Advice after some iterations: keep the plan, or swap.

    Args:
        speeds: speed of each rank, relative to the fastest, by its own history.
        present_s: seconds of an iteration under the present plan at these speeds, as predicted.
        best_s: the same under the best plan found.
        restart: a plan that is faster by more than the threshold than the best found, with other layers in
            its stages; ``None``: none was found.
        moves: whether a round by `restart` pays back its start.
        plan: plan to swap to; ``None``: keep the present one.
    """

    iteration: int
    speeds: tuple[float, ...]
    changed: tuple[int, ...]
    present_s: float
    best_s: float
    plan: Plan | None
    reason: str
    restart: Plan | None = None
    restart_s: float = 0.0
    moves: bool = False

    @property
    def gain(self) -> float:
        """Share of an iteration that the best plan saves."""
        return 1 - self.best_s / self.present_s


class Advisor:
    """Follows the ranks' speeds in a job and looks for better plans.

    Args:
        threshold: the least gain that is worth a swap, as a part of an iteration.
        packed: whether sequences consist of documents: their lengths change the work of all ranks alike, so
            times are taken relative to the median rank of an iteration.
        interval: iterations in which a swap must pay back.
    """

    def __init__(
        self,
        plan: Plan,
        job: Job,
        cluster: Cluster,
        threshold: float,
        interval: int,
        packed: bool = False,
        shares: bool = False,
    ) -> None:
        self._job, self._cluster = job, cluster
        self._threshold, self._interval, self._packed = threshold, interval, packed
        self._shares = shares
        self._histories: list[RankHistory] = []
        self._changed: set[int] = set()
        self._first = plan
        self._cut: tuple[tuple[float, ...], Plan] | None = None
        self._moved: tuple[tuple[float, ...], tuple[Plan | None, float]] | None = None
        self.swapped(plan)

    def swapped(self, plan: Plan) -> None:
        """Take note that the ranks train under another plan; their speeds stay known."""
        self._plan, self._cut, self._moved = plan, None, None
        costs = sorted(CostModel(self._job, self._cluster).estimate(plan).ranks, key=lambda cost: cost.rank)
        self._units = [unit.ranks for unit in unit_rows(plan, stages=self._job.pipeline_parallel)]
        self._gpus = [cost.gpu for cost in costs]
        # A rank that has nothing to do is as fast as it may be.
        least = 1e-3 * max(cost.compute_s for cost in costs)
        self._work_s = [max(least, cost.compute_s) for cost in costs]
        self._histories = self._histories or [RankHistory() for _ in costs]

    def advise(
        self, iteration: int, busy_s: Sequence[Sequence[float]], swap_s: float, start_s: float = math.inf
    ) -> Advice:
        """Return advice from measured times.

        Args:
            busy_s: seconds in which each rank was busy, for each iteration.
            swap_s: seconds that a swap takes.
            start_s: seconds without training before the first iteration of a new round, in which layers may
                move; infinite: there are no rounds.
        """
        for row in busy_s:
            self._note([busy / work for busy, work in zip(row, self._work_s, strict=True)])
        if min(map(len, self._histories)) < WINDOW:
            return Advice(iteration, (), (), 1.0, 1.0, None, "too few iterations yet")
        speeds = self._speeds()
        cluster = self._cluster.at_speeds(self.by_gpu(speeds))
        model = CostModel(self._job, cluster)
        if self._cut is None or self._cut[0] != speeds:
            self._cut = speeds, self._cut_anew(model)
        new_plan = self._cut[1]
        present, best = model.timing(self._plan), model.timing(new_plan)
        before, after = present.phases.total, best.phases.total
        changed, self._changed = tuple(sorted(self._changed)), set()
        plan: Plan | None = None
        if not best.fits:
            reason = "the better plan does not fit in memory"
        elif before - after <= self._threshold * before:
            reason = "the gain is below the threshold"
        elif (before - after) * self._interval <= swap_s:
            reason = "the gain does not pay back the swap within an interval"
        else:
            plan, reason = new_plan, "the gain passes the threshold"
        restart, restart_s = self._restarted(model)
        if after - restart_s <= self._threshold * before:
            restart, restart_s = None, 0.0
        horizon = _ROUND_INTERVALS * self._interval
        moves = restart is not None and (after - restart_s) * horizon > start_s
        return Advice(iteration, speeds, changed, before, after, plan, reason, restart, restart_s, moves)

    def by_gpu(self, speeds: Sequence[float]) -> dict[int, float]:
        """Return the ranks' speeds by the numbers of their GPUs in the cluster."""
        return dict(zip(self._gpus, speeds, strict=False))

    def _restarted(self, model: CostModel) -> tuple[Plan | None, float]:
        """Return the best plan found with layers moved between stages, and its seconds of an iteration."""
        assert self._cut is not None
        speeds, plan = self._cut
        depth = max(len(replica.stages) for replica in plan.replicas)
        if plan.has_ministages or depth == 1:
            return None, 0.0
        if self._moved is None or self._moved[0] != speeds:
            start = Candidate(plan, self._job, model.timing(plan))
            moved = Climb([layer_moves], lambda _job: model).best(start, _MOST_MOVES)
            cut = recut(moved.plan, self._job, model.cluster, self._shares)
            timing = model.timing(cut)
            self._moved = speeds, (cut if timing.fits else None, timing.phases.total)
        return self._moved[1]

    def _cut_anew(self, model: CostModel) -> Plan:
        """Return the better of two new plans, from the present and from the first: the search is local."""

        def order(plan: Plan) -> tuple[bool, float]:
            timing = model.timing(plan)
            return not timing.fits, timing.phases.total

        starts = {id(plan): plan for plan in (self._plan, self._first)}.values()
        return min((recut(plan, self._job, model.cluster, self._shares) for plan in starts), key=order)

    def _note(self, ratios: list[float]) -> None:
        scale = median(ratios) if self._packed else 1.0
        for rank, (history, ratio) in enumerate(zip(self._histories, ratios, strict=True)):
            if history.add(ratio / scale):
                self._changed.add(rank)

    def _speeds(self) -> tuple[float, ...]:
        """Return each rank's speed relative to the fastest; a tensor-parallel unit has its slowest
        rank's.
        """
        slowest = [max(self._histories[rank].level for rank in ranks) for ranks in self._units]
        levels = {rank: level for ranks, level in zip(self._units, slowest, strict=True) for rank in ranks}
        return tuple(round(min(slowest) / levels[rank], 3) for rank in range(len(levels)))


def answer(advice: Advice) -> dict[str, Any]:
    """Return an advice as a document."""
    return vars(advice) | {
        "gain": advice.gain,
        "plan": advice.plan and dump_plan(advice.plan),
        "digest": advice.plan and plan_digest(advice.plan),
        "restart": advice.restart and _spell_layers(advice.restart),
        "moved": dump_plan(advice.restart) if advice.restart and advice.moves else None,
    }


def _spell_layers(plan: Plan) -> str:
    """Return the layers of the stages of each replica, as text."""
    return "; ".join(
        " + ".join(str(stop - start) for start, stop in (stage.layers or (0, 0) for stage in replica.stages))
        for replica in plan.replicas
    )


def main() -> None:
    """Answer line by line until the input ends."""
    os.nice(_NICE)
    advisor: Advisor | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if advisor is None:
                job = Job(**request["job"] | {"model": Model(**request["model"])})
                plan, cluster = _plan(request["plan"]), read_cluster(request["cluster"])
                how = (request["threshold"], request["interval"], request["packed"], request["shares"])
                advisor = Advisor(plan, job, cluster, *how)
                document: dict[str, Any] = {}
            else:
                if request["swapped"] is not None:
                    advisor.swapped(_plan(request["swapped"]))
                measured = request["iteration"], request["busy_s"], request["swap_s"]
                advice = advisor.advise(*measured, request["start_s"] or math.inf)
                document = answer(advice) | {"by_gpu": advisor.by_gpu(advice.speeds)}
        except HexiError as problem:
            document = {"error": str(problem)}
        print(json.dumps(document, allow_nan=False), flush=True)


def _plan(text: str) -> Plan:
    return plan_from_yaml(yaml_from_text(Path("plan"), text))


if __name__ == "__main__":
    main()
