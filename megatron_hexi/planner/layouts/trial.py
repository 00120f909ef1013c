"""Times layouts by the cost model, for everything that the planner compares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hexi.cost import CostModel, Timing
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Layout, build_plan

#: A callback for the progress of a search, receives (phase, steps done, steps in total).
Progress = Callable[[str, int, int], None]

#: Memory overdrawn by less than this part can still be mended by moving a few tokens.
_MENDABLE = 0.03


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan with its timing, which is noted where `noting` is in force.

    Args:
        timing: the plan's timing by the cost model.
    """

    plan: Plan
    job: Job
    timing: Timing

    def __post_init__(self) -> None:
        note = _NOTE.get()
        if note is not None:
            note(self)

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration."""
        return self.timing.phases.total

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch a second."""
        return self.job.global_batch_size * self.job.seq_length / self.iteration_s

    @property
    def fits(self) -> bool:
        """Whether every GPU's memory suffices."""
        return self.timing.fits

    @cached_property
    def excess(self) -> float:
        """The largest part by which a GPU's memory is overdrawn; 0 where all fits."""
        return max(0.0, self.timing.fullness - 1)

    @property
    def order(self) -> tuple[float, float]:
        """Sort key, smaller is better: plans that fit or overdraw least come first, then fast plans."""
        return self.excess, self.iteration_s


#: The callback of `noting` that is in force.
_NOTE: ContextVar[Callable[[Candidate], None] | None] = ContextVar("_NOTE", default=None)


@contextlib.contextmanager
def noting(note: Callable[[Candidate], None] | None) -> Iterator[None]:
    """Tell `note` of every plan of a whole job that is timed inside this block, whoever times it."""
    before = _NOTE.set(note)
    try:
        yield
    finally:
        _NOTE.reset(before)


def order_of(candidate: Candidate) -> tuple[float, float]:
    """Sort key of candidates, see `Candidate.order`."""
    return candidate.order


@dataclass(frozen=True, eq=False)
class Trial(Candidate):
    """A candidate built from layouts.

    Args:
        window: prefetch depth of the exchange, in steps.
    """

    fleet: Fleet
    layouts: tuple[Layout, ...]
    window: int

    def __post_init__(self) -> None:
        if self.fleet.part is None:  # else a stage of a plan, which is not complete yet
            super().__post_init__()

    @property
    def promise(self) -> tuple[bool, float]:
        """Sort key of unbalanced layouts, which tolerates a small excess of memory."""
        return self.excess > _MENDABLE, self.iteration_s * (1 + 2 * self.excess)


class Judge:
    """Times layouts of any fleet (units to plan, `planner.fleet.Fleet`) of one job and cluster.

    Args:
        shards: number of units that share the optimizer's state; ``None``: all units of the layouts.
    """

    def __init__(self, fleet: Fleet, shards: int | None = None) -> None:
        self._job, self._cluster, self._part = fleet.job, fleet.cluster, fleet.part
        self.shards = shards
        self._models: dict[int, CostModel] = {}
        self.trials = 0

    def try_out(self, fleet: Fleet, layouts: Sequence[Layout], window: int) -> Trial:
        """Return the timed plan of one layout per replica; `window` is the exchange's prefetch depth."""
        self.trials += 1
        layouts = [layout.in_steps(fleet.row_step) for layout in layouts]
        plan = build_plan(fleet, layouts, window)
        model = self._model(len(layouts))
        return Trial(plan, model.job, model.timing(plan), fleet, tuple(layouts), window)

    def _model(self, replicas: int) -> CostModel:
        if replicas not in self._models:
            job = replace(self._job, data_parallel=replicas)
            self._models[replicas] = CostModel(
                job, self._cluster, self.shards, self._part, has_free_nodes=True
            )
        return self._models[replicas]
