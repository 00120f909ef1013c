"""The agent of one node: PyTorch's elastic agent, with the changes that a re-planned job needs.

PyTorch's agent numbers the ranks of the nodes that are present, starts them and, when one has ended or a node
has come, starts all of them again. Ours differs in five ways: nodes meet by a rendezvous of ours; ranks are
forked from a process that has imported Megatron; wrong input (exit code 2) ends the job; a node that comes is
taken in after a checkpoint, not at once; and a rank that has ended is told to all others at once.
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
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from megatron_hexi.elastic import say
from megatron_hexi.elastic.channel import SECRET_VARIABLE
from megatron_hexi.elastic.copies import COPIES_URL_VARIABLE, COPIES_VARIABLE, COPY_INTERVAL_VARIABLE
from megatron_hexi.elastic.entrance import is_here
from megatron_hexi.elastic.launcher.job_store import keep_store, open_door, open_line
from megatron_hexi.elastic.launcher.keeper import Keeper
from megatron_hexi.elastic.launcher.life import Life, LifeSigns, wait_as_spare
from megatron_hexi.elastic.launcher.ranks import WORDS_VARIABLE, run_rank
from megatron_hexi.elastic.launcher.rendezvous import Rendezvous
from megatron_hexi.elastic.store import (
    CLOCK_VARIABLE,
    GATE_VARIABLE,
    IN_ORDER,
    JOB_VARIABLE,
    LOST_AFTER_VARIABLE,
    NODE_VARIABLE,
    ROUND_VARIABLE,
    START_AGAIN,
    STORE_VARIABLE,
    add_spare,
)

#: Seconds for which all nodes are waited for at the beginning of the job.
_FIRST_CALL_S = 60
#: Seconds between two looks at the ranks.
_LOOK_S = 0.05
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
    """PyTorch's agent; says at once that a rank has ended, and does not restart after a user's mistake.

    Args:
        store_port: port of this node's loopback at which the store is reached.
        clock: seconds by which `job_time` is ahead of `time.monotonic`.
        keeper: ``None``: no copies are made.
    """

    def __init__(
        self,
        launch: AgentSettings,
        rendezvous: Rendezvous,
        store_port: int,
        clock: float,
        keeper: Keeper | None,
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=launch.ranks,
            rdzv_handler=rendezvous,
            entrypoint=run_rank,
            max_restarts=launch.max_losses,
            monitor_interval=_LOOK_S,
        )
        std = Std.ALL if launch.log_dir else Std.NONE
        logs = DefaultLogsSpecs(log_dir=launch.log_dir, redirects=std, tee=std)
        super().__init__(spec, logs, start_method=launch.start_method)
        self._launch, self._meeting = launch, rendezvous
        self._store_port, self._clock, self._keeper = store_port, clock, keeper

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        group = cast(Any, worker_group)  # torch declares its fields as none
        launch, name = self._launch, self._meeting.name
        self._meeting.begin_ranks(group.group_rank, [worker.global_rank for worker in group.workers])
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
        group, context = cast(Any, worker_group), cast(Any, self._pcontext)
        codes = {
            worker.global_rank: process.exitcode
            for worker, process in zip(group.workers, context._pc.processes, strict=True)
        }
        # Before torch, which takes its time to end the other ranks of the node. Those that end by themselves
        # do so everywhere.
        if ended := [rank for rank, code in codes.items() if code not in (None, 0, 2, START_AGAIN)]:
            code = codes[ended[0]] or 0
            by_signal = f"was ended by {signal.Signals(-code).name}" if code < 0 else ""
            self._meeting.tell_ended(ended, by_signal or f"has ended with code {code}")
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and exit_code(result) == 2:
            self._remaining_restarts = 0
        elif result.state == WorkerState.FAILED and self._meeting.round.check([IN_ORDER]):
            self._remaining_restarts += 1  # torch counts this end, which is no loss
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
    os.environ[WORDS_VARIABLE] = json.dumps(launch.words)
    os.environ["HEXI_AGENT"] = str(os.getpid())
    multiprocessing.set_forkserver_preload(["megatron_hexi.elastic.launcher.ranks"])
    try:
        store, store_port, clock, keeps_store = _reach_store(launch)
    except (OSError, dist.DistError):
        return _end(f"no store at {launch.host}:{launch.port}; is a node or --keep-store running there?", 1)
    if launch.start_method == "forkserver":  # nodes that train would wait for its imports
        forked = multiprocessing.get_context("forkserver").Process(target=int)
        forked.start()
        forked.join()
    try:
        job = dist.PrefixStore(f"hexi.{launch.job}", store)
        with contextlib.ExitStack() as stack:
            signs = stack.enter_context(LifeSigns(store_port))

            def new_name() -> str:
                """Return a name for this agent, which is alive while a connection to the gate lasts."""
                signs.agent = uuid.uuid4().hex
                if not keeps_store:  # which would end with this process
                    try:
                        line = open_line((launch.host, launch.port), launch.secret, signs.agent)
                    except OSError as problem:
                        raise RendezvousConnectionError(str(problem)) from problem
                    stack.enter_context(line)
                return signs.agent

            terms = launch.least, launch.most, launch.wait_s
            handler = Rendezvous(new_name, launch.address, store, job, *terms)
            keeper = None
            if launch.copy_interval is not None:
                folder, at = Path(launch.copy_folder), ("127.0.0.1", store_port)
                prefix, address = f"hexi.{launch.job}", launch.address
                keeper = Keeper(folder, at, prefix, address, launch.secret, launch.bind)
                stack.enter_context(keeper)
            if launch.spare:
                add_spare(job, launch.node, launch.ranks)
                wait_as_spare(Life(store), job, launch.most, _FIRST_CALL_S + launch.wait_s)
            else:
                _wait_for_all(launch, job)
            result: RunResult = NodeAgent(launch, handler, store_port, clock, keeper).run()
            handler.set_closed()
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
    code = exit_code(result)
    if code == 0 and launch.ended is not None:
        try:
            Path(launch.ended).touch()
        except OSError as problem:
            return _end(
                f"--ended {launch.ended}: cannot be made ({problem.strerror}); the training is done", 1
            )
    return code


def _reach_store(launch: AgentSettings) -> tuple[dist.TCPStore, int, float, bool]:
    """Return a client of the job's store, its port at this node's loopback, and the clock of `job_time`.

    The first node on the host of the rendezvous keeps the store; whether this one does is returned, too.

    Raises:
        OSError, dist.DistError: there is no store.
    """
    with contextlib.suppress(OSError):  # a process of this host keeps it already: the port is taken
        if is_here(launch.host):
            store = keep_store(launch.host, launch.port, launch.secret, launch.bind)
            return store, store.port, time.time() - time.monotonic(), True
    port, clock = open_door(launch.host, launch.port, launch.secret)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=60))
    return store, port, clock, False


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
