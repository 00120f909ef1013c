"""What to say where nothing fits: which rank, which term, by how much, and what would fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from megatron_hexi.cost import RECOMPUTES, CostModel, Job, find_shortage
from megatron_hexi.errors import HexiError, NothingFitsError
from megatron_hexi.planner.fleet.room import fleet_has_room
from megatron_hexi.planner.fleet.units import Fleet, find_units
from megatron_hexi.planner.layouts.measured import Measured
from megatron_hexi.planner.layouts.trial import Judge, Trial
from megatron_hexi.planner.search.domain import DomainSearch

#: Contexts are proposed as multiples of this.
_ROUND = 1024
#: How far below the estimate shorter contexts are tried.
_SHORTER = (0.95, 0.85, 0.7)


def nothing_fits(fleet: Fleet, best: Trial) -> NothingFitsError:
    """The error for a job that does not fit.

    Args:
        fleet: all units.
        best: the trial that comes closest.
    """
    job = replace(fleet.job, data_parallel=len(best.layouts))
    shortage = find_shortage(CostModel(job, fleet.cluster).estimate(best.plan))
    changes = [words for words in (_recompute(fleet), _context(fleet, best), _cut(fleet)) if words]
    remedy = "; or ".join(changes) if changes else "take GPUs with more memory, or a smaller model"
    return NothingFitsError(
        f"no plan fits on cluster {fleet.cluster.name} at {job.seq_length} tokens; the closest: {shortage}; "
        f"what would fit: {remedy}"
    )


def _recompute(fleet: Fleet) -> str:
    level = RECOMPUTES.index(fleet.job.recompute)
    for recompute in RECOMPUTES[level + 1 :]:
        if _fits(fleet, replace(fleet.job, recompute=recompute)):
            return f"recompute = {recompute}"
    return ""


def _context(fleet: Fleet, best: Trial) -> str:
    """The longest context, about: what grows with tokens, against the memory there is for it."""
    for length in _lengths(fleet.job, best):
        if _fits(fleet, replace(fleet.job, seq_length=length)):
            return f"a context of {length}"
    return ""


def _lengths(job: Job, best: Trial) -> Iterator[int]:
    measured = Measured.of(best)
    used = [unit for layout in best.layouts for unit in layout.units]
    free = measured.free[used].clip(min=0).sum()
    taken = measured.inside[used].sum() + len(best.layouts) * job.seq_length * measured.token_bytes
    for part in _SHORTER:
        length = int(job.seq_length * min(1.0, free / taken) * part) // _ROUND * _ROUND
        if 0 < length < job.seq_length:
            yield length


def _cut(fleet: Fleet) -> str:
    """More tensor parallelism, where nodes and heads allow it."""
    for factor in (2, 4, 8):
        size = factor * fleet.job.tensor_parallel
        with contextlib.suppress(HexiError):
            if _fits(fleet, replace(fleet.job, tensor_parallel=size)):
                return f"tensor_parallel = {size}"
    return ""


def _fits(fleet: Fleet, job: Job) -> bool:
    """Whether a quick search finds a plan for one replica."""
    job = replace(job, data_parallel=1)
    changed = find_units(job, fleet.cluster)
    if not fleet_has_room(changed):
        return False
    search = DomainSearch(Judge(changed), changed, job.global_batch_size // job.micro_batch_size)
    return search.run(polished=False).fits
