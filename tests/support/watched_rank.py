"""Ranks that do nothing but collectives, under a watch; one of them comes to grief as it is told.

    python -m tests.support.watched_rank RANKS WHO HOW [TIMEOUT_S]

forks the ranks from one process that has imported torch, each with a log of its own in the working directory,
and prints a line for each that ended: its number and exit code. Where ``RANK`` is set, it is that rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.lab.testbed.job import free_port
from megatron_hexi.runtime.watch import start_watch

#: The collective before which it happens.
_AT = 20


def come_to_grief(how: str) -> None:
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "mistaken":
            raise HexiError("value 7 is too large; give 6")
        case "broken":
            raise ValueError("nobody expected this")
        case "done":
            sys.exit(0)
        case "cut":
            subprocess.run(["ip", "link", "set", "dev", "eth0", "down"], check=True)


def be_a_rank(who: int, how: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    store = dist.PrefixStore("watch", dist.distributed_c10d._get_default_store())
    start_watch(store, rank, dist.get_world_size())
    with user_errors():
        for number in range(10**6):
            if number == _AT and rank == who:
                come_to_grief(how)
            dist.all_reduce(torch.ones(1))


def fork(ranks: int, who: int, how: str, timeout_s: float, limit_s: float = 60.0) -> None:
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = {}
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            log = os.open(f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ |= {**shared, "RANK": str(rank)}
            be_a_rank(who, how, timeout_s)
            return
        processes[process] = rank
    started = time.time()
    left = set(processes)
    while left - {process for process in left if processes[process] == who and how == "stopped"}:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            left.discard(process)
            ended = [processes[process], os.waitstatus_to_exitcode(status)]
            print(json.dumps(ended), flush=True)
        if time.time() > started + limit_s:
            break
        time.sleep(0.02)
    for process in left:
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    grief = int(sys.argv[-3]), sys.argv[-2], float(sys.argv[-1])
    if "RANK" in os.environ:
        be_a_rank(*grief)
    else:
        fork(int(sys.argv[1]), *grief)
