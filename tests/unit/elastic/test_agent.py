"""Agents end ranks that wait for lost ones, and start all again; the ranks here train nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_hexi.elastic.launcher import agent
from megatron_hexi.elastic.launcher.agent import AgentSettings, run_agent
from megatron_hexi.elastic.launcher.job_store import keep_store
from megatron_hexi.elastic.store import DECIDED, ROUND_VARIABLE, STORE_VARIABLE, TRAINING, watch_store
from megatron_hexi.lab.testbed.ports import free_port

SECRET = b"known to the job's nodes alone"
#: Silence after which a rank would count as lost: longer than the test.
PATIENCE_S = 600.0


def rank(_entry: str, _words: tuple[str, ...], variables: dict[str, str]) -> None:
    """A rank whose main thread never notices a loss, as in a collective of NCCL."""
    os.environ |= variables
    from megatron_hexi.runtime.watch import start_watch, stop_watch

    port = int(os.environ[STORE_VARIABLE].rpartition(":")[2])
    job = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=60))
    round_ = dist.PrefixStore(os.environ[ROUND_VARIABLE], job)
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if number == 0:
        round_.set(DECIDED, json.dumps({"ranks": list(range(ranks))}))
        round_.set(TRAINING, "")
    if ranks > 1:
        start_watch(watch_store(round_), number, ranks)
    here = {"rank": number, "ranks": ranks, "process": os.getpid()}
    job.set(f"up/{job.add('count', 1)}", json.dumps(here))
    while not job.check(["finish"]):
        time.sleep(0.1)
    stop_watch()


def settings(port: int, node: str) -> AgentSettings:
    return AgentSettings(
        least=1,
        most=2,
        ranks=1,
        host="localhost",
        port=port,
        secret=SECRET,
        bind=None,
        job="job",
        node=node,
        address=node,
        max_losses=10,
        lost_after_s=PATIENCE_S,
        wait_s=300.0,
        ended=None,
        when_store_lost=None,
        copy_interval=None,
        copy_folder="",
        log_dir=None,
        start_method="spawn",
        entry="",
        words=(),
    )


@pytest.mark.timeout(600)
def test_ranks_that_wait_for_a_lost_one_are_ended_and_all_start_again(monkeypatch):
    for name in ("HEXI_ELASTIC_WORDS", "HEXI_AGENT", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(agent, "run_rank", rank)
    lines = []

    def held(*words: Any) -> Any:
        lines.append(hold_line(*words))
        return lines[-1]

    monkeypatch.setattr(agent, "hold_line", held)
    port = free_port()
    job = keep_store("localhost", port, SECRET)
    codes: dict[str, int] = {}

    def run(node: str) -> None:
        codes[node] = run_agent(settings(port, node))

    def up(first: int, count: int) -> list[dict[str, int]]:
        """The ranks that came up, in the order of their coming."""
        keys = [f"up/{first + number}" for number in range(count)]
        until = time.monotonic() + 200
        while not job.check(keys):
            assert time.monotonic() < until
            time.sleep(0.05)
        return [json.loads(text) for text in job.multi_get(keys)]

    threads = [threading.Thread(target=run, args=(node,)) for node in ("n0", "n1")]
    for thread in threads:
        thread.start()
    both = up(1, 2)
    assert sorted((one["rank"], one["ranks"]) for one in both) == [(0, 2), (1, 2)]

    os.kill(both[0]["process"], signal.SIGKILL)
    begun = time.monotonic()
    both = up(3, 2)
    print(f"{time.monotonic() - begun:.1f} s from a rank's end to the next round")
    assert sorted((one["rank"], one["ranks"]) for one in both) == [(0, 2), (1, 2)]

    lines[1].close()  # as the system does when the agent is killed
    begun = time.monotonic()
    [alone] = up(5, 1)
    print(f"{time.monotonic() - begun:.1f} s from an agent's end to the next round")
    assert (alone["rank"], alone["ranks"]) == (0, 1)
    job.set("finish", "")
    for thread in threads:
        thread.join(60)
    assert codes == {"n0": 0, "n1": 0}
