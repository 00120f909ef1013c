"""Ranks as processes, joined by a TCP store, as torchrun would start them."""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=60)

#: Forks the ranks, so that torch is imported once for all of them.
_RANKS = multiprocessing.get_context("forkserver")
_RANKS.set_forkserver_preload(["torch", "megatron_hexi.runtime"])


def connect(port):
    """A client of the job's store."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)


def serve():
    """A store on a free port; it lives as long as the object."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)


def run_processes(count, work, *arguments, limit_s=200):
    """Run ``work(rank, store, *arguments)`` in `count` processes with a gloo world; results in rank order.

    Args:
        count: processes.
        work: a function of a module; what it takes and returns is pickled.
        *arguments: for `work`, after rank and store.
        limit_s: after this all are ended, and it is an error.
    """
    store = serve()
    answers = _RANKS.Queue()
    processes = [
        _RANKS.Process(target=_body, args=(rank, count, store.port, work, arguments, answers), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    try:
        while len(results) < count:
            try:
                rank, result, error = answers.get(timeout=1)
            except queue.Empty:
                fallen = [i for i, p in enumerate(processes) if p.exitcode not in (None, 0)]
                assert not fallen, f"ranks {fallen} ended with {[processes[i].exitcode for i in fallen]}"
                assert time.monotonic() < deadline, f"only ranks {sorted(results)} came to an end"
                continue
            assert error is None, f"rank {rank}: {error}"
            results[rank] = result
    finally:
        for process in processes:
            process.join(0 if len(results) < count else 20)
            process.kill()
    return [results[rank] for rank in range(count)]


def _body(rank, count, port, work, arguments, answers):
    torch.set_num_threads(1)
    try:
        store = connect(port)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=count, timeout=_TIMEOUT
        )
        answers.put((rank, work(rank, store, *arguments), None))
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
