"""The doctor on several ranks: facts go to rank 0, the verdict comes back, and nobody waits for ever."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import threading
from dataclasses import replace

import pytest

from megatron_hexi.doctor.facts import Facts
from megatron_hexi.doctor.gather import LaunchedJob, answer, joined, receive_facts, send_facts
from megatron_hexi.errors import HexiError
from megatron_hexi.lab.testbed.job import free_port
from tests.support.processes import serve


def _facts(rank: int) -> Facts:
    return Facts(host="abc"[rank // 2], rank=rank, python="3.12.3", executable="/usr/bin/python")


def _job(rank: int, size: int, port: int, served: bool = True) -> LaunchedJob:
    return LaunchedJob(rank, size, "127.0.0.1", port, served)


def _in_threads(works):
    results: dict[int, object] = {}

    def run(number, work):
        try:
            results[number] = work()
        except HexiError as problem:
            results[number] = problem

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[number] for number in range(len(works))]


def _first(job: LaunchedJob, timeout_s: float, healthy: bool):
    with joined(job, timeout_s) as store:
        found, silent = receive_facts(store, job, _facts(0), timeout_s)
        answer(store, job, len(found), healthy=healthy)
    return [own.rank for own in found], silent


def _other(job: LaunchedJob, timeout_s: float):
    with joined(job, timeout_s) as store:
        return send_facts(store, _facts(job.rank), timeout_s)


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("served", [True, False], ids=["the launcher serves", "rank 0 serves"])
def test_all_ranks_hear_one_verdict(served, healthy):
    store = serve()
    port = store.port if served else free_port()
    works = [functools.partial(_first, _job(0, 4, port, served), 20, healthy)]
    works += [functools.partial(_other, _job(rank, 4, port, served), 20) for rank in (1, 2, 3)]
    assert _in_threads(works) == [([0, 1, 2, 3], []), healthy, healthy, healthy]


def test_ranks_that_never_come_are_named_in_time():
    store = serve()
    works = [lambda: _first(_job(0, 5, store.port), 1, False), lambda: _other(_job(3, 5, store.port), 10)]
    assert _in_threads(works) == [([0, 3], [1, 2, 4]), False]


def test_without_rank_0_the_others_give_up():
    store = serve()
    (problem,) = _in_threads([lambda: _other(_job(1, 2, store.port), 1)])
    assert "rank 0 ended, or did not answer within 1 s" in str(problem)


def test_a_store_that_is_not_there_is_one_line():
    (problem,) = _in_threads([lambda: _other(_job(1, 2, free_port(), served=False), 1)])
    assert isinstance(problem, HexiError)
    assert "cannot be reached" in str(problem)
    assert "\n" not in str(problem)


def test_facts_arrive_as_they_were_sent():
    store = serve()
    job = _job(0, 2, store.port)
    sent = replace(_facts(1), environment={"NCCL_DEBUG": "INFO"}, unknown=(("driver", "none"),))

    def first():
        with joined(job, 10) as own:
            found, _ = receive_facts(own, job, _facts(0), 10)
            answer(own, job, 2, healthy=True)
        return found

    def other():
        with joined(_job(1, 2, store.port), 10) as own:
            return send_facts(own, sent, 10)

    found, _ = _in_threads([first, other])
    assert found == [_facts(0), sent]


def test_facts_of_another_version_are_not_our_fault():
    store = serve()
    job = _job(0, 2, store.port)
    with joined(job, 5) as own:
        own.set("facts/1", '{"host": ["b"], "other": 1}')
        (_, other), silent = receive_facts(own, job, _facts(0), 5)
    assert silent == []
    assert other.rank == 1
    assert "another version of megatron-hexi" in other.unknown[0][1]


def test_under_torchrun_rank_0_reports_for_all(forks):
    """Two processes as torchrun starts them, one of them with a variable of its own."""
    program = (
        "import os, sys; os.environ.update({'NCCL_PROTO': 'Simple'} if os.environ['RANK'] == '1' else {}); "
        "sys.argv = ['hexi', 'doctor', '--json', '--timeout', '120']; "
        # Megatron, whose import takes seconds on each rank, is looked at in the tests of one process.
        "from megatron_hexi.doctor.gather import _PARTS; del _PARTS['packages'], _PARTS['patches']; "
        "from megatron_hexi.cli.main import main; main()"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "GLOO_"))}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    run = subprocess.run(
        [forks.python, *torchrun, forks.python, "-c", program],
        capture_output=True,
        text=True,
        timeout=250,
        env=clean | {"OMP_NUM_THREADS": "1"},
    )
    document = json.loads(run.stdout)
    assert [facts["rank"] for facts in document["ranks"]] == [0, 1]
    host = socket.gethostname()
    assert f"NCCL_PROTO differs: not set on {host} (rank 0); Simple on {host} (rank 1)" in [
        problem["what"] for problem in document["problems"]
    ]
    assert document["healthy"], document["problems"]
    assert run.returncode == 0, run.stderr
