"""The agent of one node: PyTorch's elastic agent, with the changes that a re-planned job needs.

PyTorch's agent finds the nodes that are present, numbers their ranks, starts these and, when one has ended or
a node has come, starts all of them again. Ours differs in four ways: ranks are forked from a process that has
imported Megatron; wrong input (exit code 2) ends the job; a node that comes is taken in after a checkpoint,
not at once; and each round of the ranks has a name of its own in the job's store.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from megatron_hexi.elastic import say
from megatron_hexi.elastic.channel import SECRET_VARIABLE
from megatron_hexi.elastic.copies import COPIES_URL_VARIABLE, COPIES_VARIABLE, COPY_INTERVAL_VARIABLE
from megatron_hexi.elastic.entrance import is_here
from megatron_hexi.elastic.launcher.job_store import keep_store, open_door
from megatron_hexi.elastic.launcher.keeper import Keeper
from megatron_hexi.elastic.launcher.life import MISSED, SIGN_S, LifeSigns, RoundLife, wait_as_spare
from megatron_hexi.elastic.launcher.ranks import WORDS_VARIABLE, run_rank
from megatron_hexi.elastic.launcher.rendezvous import ClocklessBackend, PatientRendezvous
from megatron_hexi.elastic.store import (
    BROKEN,
    CLOCK_VARIABLE,
    GATE_VARIABLE,
    JOB_VARIABLE,
    LOST_AFTER_VARIABLE,
    NODE_VARIABLE,
    ROUND_VARIABLE,
    STORE_VARIABLE,
    Fence,
    add_spare,
    begin_present,
    find_present,
)

#: Seconds for which more nodes are waited for once the fewest that suffice have come; others join later.
_LAST_CALL_S = 1
#: Seconds for which all nodes are waited for at the beginning of the job.
_FIRST_CALL_S = 60
#: Signs of life that a node may miss before ranks that start beside it are started again. A busy machine
#: misses some; ranks would wait for each other for minutes.
_SURELY_MISSED = 12
#: Seconds until ranks that do not end by SIGTERM are killed: the watch takes that long to report a lost rank.
_SHUTDOWN_S = 6


@dataclass(frozen=True)
class AgentSettings:
    """Settings of one node's agent: the options of its command line.

    Args:
        least: number of nodes that suffice; `most` can take part.
        entry: the module `ranks.ENTRY`, or a training script, which ranks run with `words`.
    """

    least: int
    most: int
    spare: bool
    ranks: int
    host: str
    port: int
    secret: bytes = field(repr=False)
    bind: str | None
    job: str
    node: str
    address: str
    max_losses: int
    lost_after_s: float
    wait_s: float
    ended: str | None
    when_store_lost: str | None
    copy_interval: int | None
    copy_folder: str
    log_dir: str | None
    start_method: str
    entry: str
    words: tuple[str, ...]


class NodeAgent(LocalElasticAgent):
    """PyTorch's agent; names each round of ranks in the store, and does not restart after a user's mistake.

    Args:
        store_port: port of this node's loopback at which the store is reached.
        clock: seconds by which `job_time` is ahead of `time.monotonic`.
        keeper: ``None``: no copies are made.
    """

    def __init__(
        self,
        launch: AgentSettings,
        rendezvous: PatientRendezvous,
        store: dist.Store,
        job: dist.Store,
        store_port: int,
        clock: float,
        life: LifeSigns,
        keeper: Keeper | None,
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=launch.ranks,
            rdzv_handler=rendezvous,
            entrypoint=run_rank,
            max_restarts=launch.max_losses,
            monitor_interval=0.1,
        )
        std = Std.ALL if launch.log_dir else Std.NONE
        logs = DefaultLogsSpecs(log_dir=launch.log_dir, redirects=std, tee=std)
        super().__init__(spec, logs, start_method=launch.start_method)
        self._launch, self._meeting, self._whole_store, self._job = launch, rendezvous, store, job
        self._store_port, self._clock, self._life, self._keeper = store_port, clock, life, keeper
        self._before = ""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._before = find_present(self._job)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        group = cast(Any, worker_group)  # torch declares its fields as none
        store, launch = group.store, self._launch
        if group.group_rank == 0:
            name = uuid.uuid4().hex
            begin_present(self._job, name, group.group_world_size, self._before)
            store.set("name", name)
        name = store.get("name").decode()
        self._meeting.round = dist.PrefixStore(name, self._whole_store)
        self._meeting.life = RoundLife(self._meeting.round, group.group_world_size, _SURELY_MISSED)
        self._meeting.fence = Fence(self._job, name)
        self._meeting.is_full = group.group_world_size == launch.most
        self._life.begin_round(name, group.group_rank)
        variables = {
            STORE_VARIABLE: f"127.0.0.1:{self._store_port}",
            GATE_VARIABLE: f"{launch.host}:{launch.port}",
            CLOCK_VARIABLE: str(self._clock),
            JOB_VARIABLE: launch.job,
            ROUND_VARIABLE: name,
            NODE_VARIABLE: launch.node,
            LOST_AFTER_VARIABLE: str(launch.lost_after_s),
        }
        if self._keeper is not None:
            self._keeper.begin_round(name, group.group_rank)
            variables |= {
                SECRET_VARIABLE: launch.secret.decode(),  # copies alone need it
                COPY_INTERVAL_VARIABLE: str(launch.copy_interval),
                COPIES_VARIABLE: str(self._keeper.folder),
                COPIES_URL_VARIABLE: self._keeper.url,
            }
        worker_group.spec.args = (launch.entry, launch.words, variables)
        processes = super()._start_workers(worker_group)
        # torch gives ranks 30 seconds to end by SIGTERM, and before 2.12 takes no other number. One that is
        # stopped would use them all.
        context = cast(Any, self._pcontext)
        context._close = functools.partial(_close_soon, context._close)
        ranks = context._pc
        ranks._join_procs_with_timeout = functools.partial(_join_soon, ranks._join_procs_with_timeout)
        return processes

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            if self._meeting.round is not None:  # the agent of a rank that is stopped learns it so
                self._meeting.round.set(BROKEN, "")
            if exit_code(result) == 2:
                self._remaining_restarts = 0
        return result


def _close_soon(close: Callable[..., None], death_sig: signal.Signals, timeout: int) -> None:
    close(death_sig, min(timeout, _SHUTDOWN_S))


def _join_soon(join: Callable[[float], None], timeout: float) -> None:
    join(min(timeout, _SHUTDOWN_S))


def exit_code(result: RunResult) -> int:
    """Return the launcher's exit code: 0, 2 where a rank found the input wrong, else 1."""
    if not result.is_failed():
        return 0
    return 2 if any(failure.exitcode == 2 for failure in result.failures.values()) else 1


def run_agent(launch: AgentSettings) -> int:
    """Run this node's ranks, round after round, and return the exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # PyTorch 2.14 shares an agent's store over all rounds, but tells its address to those of the first alone.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[WORDS_VARIABLE] = json.dumps(launch.words)
    os.environ["HEXI_AGENT"] = str(os.getpid())
    multiprocessing.set_forkserver_preload(["megatron_hexi.elastic.launcher.ranks"])
    if launch.start_method == "forkserver":
        from multiprocessing import forkserver

        forkserver.ensure_running()  # imports while nodes meet
    try:
        store, store_port, clock = _reach_store(launch)
    except (OSError, dist.DistError):
        return _end(f"no store at {launch.host}:{launch.port}; is a node or --keep-store running there?", 1)
    try:
        backend = C10dRendezvousBackend(store, launch.job)
        handler: PatientRendezvous = PatientRendezvous.from_backend(
            launch.job,
            store,
            ClocklessBackend(backend, launch.job, launch.secret, _LAST_CALL_S),
            launch.least,
            launch.most,
            launch.address,
            RendezvousTimeout(
                join=timedelta(seconds=launch.wait_s), last_call=timedelta(seconds=_LAST_CALL_S)
            ),
            keep_alive_interval=SIGN_S,
            keep_alive_max_attempt=MISSED,
        )
        with contextlib.ExitStack() as stack:
            keeper = None
            if launch.copy_interval is not None:
                folder, at = Path(launch.copy_folder), ("127.0.0.1", store_port)
                prefix, address = f"hexi.{launch.job}", launch.address
                keeper = Keeper(folder, at, prefix, address, launch.secret, launch.bind)
                stack.enter_context(keeper)
            job = dist.PrefixStore(f"hexi.{launch.job}", store)
            if launch.spare:
                add_spare(job, launch.node, launch.ranks)
                wait_as_spare(store, job, launch.most, handler.is_closed, _FIRST_CALL_S + launch.wait_s)
            else:
                _wait_for_all(launch, job)
            life = stack.enter_context(LifeSigns(store_port))
            agent = NodeAgent(launch, handler, store, job, store_port, clock, life, keeper)
            result: RunResult | None = agent.run()
    except SignalException:  # this node is to end, the others go on
        return 143
    except RendezvousClosedError:
        return _end("the job has ended", 0)
    except RendezvousTimeoutError:
        return _end(f"fewer than {launch.least} nodes have come within {launch.wait_s:g} s", 1)
    except (RendezvousError, dist.DistError) as problem:
        if launch.when_store_lost is not None:
            subprocess.run(["bash", launch.when_store_lost], check=False)
        reason = str(problem.__cause__ or problem).partition("\n")[0][:200]
        place = f"{launch.host}:{launch.port}"
        return _end(f"the store at {place} is gone, or this node is cut off from it ({reason})", 1)
    if result is None:  # PyTorch lets nodes beyond the most that take part wait, and ends so with the job
        return _end("the job has ended", 0)
    handler.shutdown()
    code = exit_code(result)
    if code == 0 and launch.ended is not None:
        try:
            Path(launch.ended).touch()
        except OSError as problem:
            return _end(
                f"--ended {launch.ended}: cannot be made ({problem.strerror}); the training is done", 1
            )
    return code


def _reach_store(launch: AgentSettings) -> tuple[dist.TCPStore, int, float]:
    """Return a client of the job's store, its port at this node's loopback, and the clock of `job_time`.

    The first node on the host of the rendezvous keeps the store.

    Raises:
        OSError, dist.DistError: there is no store.
    """
    with contextlib.suppress(OSError):  # a process of this host keeps it already: the port is taken
        if is_here(launch.host):
            store = keep_store(launch.host, launch.port, launch.secret, launch.bind)
            return store, store.port, time.time() - time.monotonic()
    port, clock = open_door(launch.host, launch.port, launch.secret)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=60))
    return store, port, clock


def _wait_for_all(launch: AgentSettings, job: dist.Store) -> None:
    """Wait at the beginning of a job until all nodes have joined, with a time limit."""
    came, deadline = job.add("came", 1), time.monotonic() + _FIRST_CALL_S
    while came < launch.most and not job.check(["rounds"]) and time.monotonic() < deadline:
        time.sleep(0.1)
        came = job.add("came", 0)


def _end(message: str, code: int) -> int:
    """Say why the agent ends; return its exit code."""
    say(message)
    return code
