"""Many ranks in one process: a thread a rank, joined by real gloo process groups.

The code under test is the one that runs in a job; only the ranks are threads. Eight of them take
milliseconds, so that hundreds of plans can be tried. Groups are kept and used again, because taking a
gloo group down takes longer than most tests, and leaving it behind uses up sockets.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hexi.plan import Plan, Schedules
from megatron_hexi.plan.units import domain_rows
from megatron_hexi.runtime import DomainAttention

_TIMEOUT = timedelta(seconds=60)

#: Groups of earlier runs, by purpose, size, first rank and own position. A run makes a group on all of its
#: positions or on none.
_kept: dict[tuple[str, int, int, int], dist.ProcessGroup] = {}


@dataclass
class ThreadRank:
    """What one thread needs to make process groups with the others."""

    rank: int
    store: dist.Store

    def new_group(self, purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A gloo group of these ranks; every one of them must ask for it.

        Groups of one purpose must not share a first rank.
        """
        position = list(ranks).index(self.rank)
        key = (purpose, len(ranks), ranks[0], position)
        if key not in _kept:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [_device()]
            options._timeout = _TIMEOUT
            store = dist.PrefixStore(f"{purpose}-{ranks[0]}", self.store)
            _kept[key] = dist.ProcessGroupGloo(store, position, len(ranks), options)  # type: ignore[assignment]
        # batch_isend_irecv and get_backend look a group up here; one that torch did not make is unknown.
        world, group = distributed_c10d._world, _kept[key]
        world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
        world.pg_map[group] = ("gloo", self.store)
        return group

    def attention(self, plan: Plan, kernel: str = "auto", replica: int = 0) -> DomainAttention:
        """This rank's part of a plan, with the groups that it needs."""
        row = domain_rows(plan)[replica]
        schedules = Schedules(plan.workload, row.domain, self.rank, plan.exchange.parts, row.rates)
        everyone = self.new_group("domain", range(len(row.domain.members)))
        a2a = self.new_group("a2a", schedules().members)
        return DomainAttention(plan.workload, schedules, everyone, a2a, plan.exchange.window, kernel)


def run_ranks(count: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """Run `work` on every rank; the results in rank order. The first rank's error is raised."""
    store = dist.HashStore()
    results: list[Any] = [None] * count
    errors: list[BaseException | None] = [None] * count

    def body(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(rank, store))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT.total_seconds() + 10)
        assert not thread.is_alive(), "a rank hangs"
    for error in errors:
        if error is not None:
            _forget_groups()
            raise error
    return results


def _forget_groups() -> None:
    """After an error groups may hold messages that nobody fetched."""
    for group in _kept.values():
        del distributed_c10d._world.pg_group_ranks[group]
        del distributed_c10d._world.pg_map[group]
    _kept.clear()


@functools.cache
def _device() -> Any:
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
