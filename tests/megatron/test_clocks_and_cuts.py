"""Nodes whose clocks differ or are set, that are cut off or stopped: at most one half of a job goes on."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from functools import partial

import psutil
import pytest

from tests.megatron.elastic import ElasticJob
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_elastic import TWO, check_losses, more_lines, words
from tests.support.clocks import Clock, needs_cc
from tests.support.links import Links

PACED = ("--copy-interval", "2", "--script", str(REPOSITORY / "tests/megatron/paced.py"))
TWO_NODES = {"n0": 1.0, "n1": 1.0}


def check_one_half_wrote(job: ElasticJob) -> None:
    """Iterations follow each other, but for those that a new round does again: nobody else did any beside."""
    done = [iteration for iteration, _ in job.losses()]
    again = sum(after != before + 1 for before, after in itertools.pairwise(done))
    assert again <= len(job.rounds()) - 1, (done, job.rounds())


@needs_cc
def test_nodes_whose_clocks_differ_are_refused(tmp_path):
    ahead = {"n1": 6.0, "n2": -8.0, "n3": 3600.0}
    clocks = {name: Clock(tmp_path / name, seconds) for name, seconds in ahead.items()}
    with ElasticJob(tmp_path, "1:2", [], clocks=clocks) as job:
        job.start(*ahead)
        assert job.wait_for_end(60) == dict.fromkeys(ahead, 2)
        for name, by in ahead.items():
            [line] = job.said(name).splitlines()
            seconds, way = re.findall(r"clock is (\d+\.\d) s (ahead of|behind) the store's", line)[0]
            assert float(seconds) == pytest.approx(abs(by), abs=0.5)
            assert way == ("ahead of" if by > 0 else "behind")


@needs_cc
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("step", "waits"),
    [
        pytest.param(6.0, False, id="default"),
        *(pytest.param(s, w, marks=pytest.mark.slow) for s in (-8.0, 6.0, 3600.0) for w in (False, True)),
    ],
)
def test_a_clock_that_steps_splits_and_stops_nothing(forks, tmp_path, step, waits):
    """While it trains, or waits to be taken in; then a rank of the other node is killed."""
    clock = Clock(tmp_path / "clock")
    args = words(tmp_path, TWO, TWO_NODES, 100_000, 1000)
    with ElasticJob(tmp_path, "1:2", args, launcher=PACED, clocks={"n1": clock}) as job:
        job.start("n0", "n1")
        job.wait(lambda: job.safe_copy() > 2)
        if waits:
            job.kill("n1")
            job.wait(lambda: len(job.rounds()) == 2)
            job.wait(partial(more_lines, job, job.lines() + 1))
            os.kill(job.rank("n0").pid, signal.SIGSTOP)  # nobody is taken in
            job.start("n1")
            time.sleep(8)
            clock.set(step)
            time.sleep(6)
            os.kill(job.rank("n0").pid, signal.SIGCONT)
        else:
            clock.set(step)
            time.sleep(6)  # by PyTorch's own clocks each would have dropped the other
            os.kill(job.rank("n0").pid, signal.SIGKILL)
        took = job.wait(lambda: len(job.rounds()) > 1 and "2 ranks" in job.rounds()[-1], 120)
        print(f"went on with both {took:.1f} s later")
        job.wait(partial(more_lines, job, job.lines() + 8), 60)
        print("\n".join(job.rounds()))
        assert len(job.rounds()) <= 3
        assert "2 ranks" in job.rounds()[-1]
        check_one_half_wrote(job)
        last = max(iteration for iteration, _ in job.losses())
    check_losses(job, forks, tmp_path, TWO, last)


def processes(job: ElasticJob, node: str) -> list[psutil.Process]:
    """The agent of a node and all below it."""
    agent = psutil.Process(job.agents[node].pid)
    return [agent, *agent.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("nodes", ["1:2", "2:2"])
@pytest.mark.parametrize("victim", ["n0", "n1"])
@pytest.mark.parametrize("agent_only", [False, True], ids=["node", "agent"])
def test_what_is_stopped_for_half_a_minute_writes_nothing_afterwards(
    forks, tmp_path, victim, nodes, agent_only
):
    """A node, or its agent alone, without which ranks do not reach the store."""
    args = words(tmp_path, TWO, TWO_NODES, 100_000, 10)
    launcher = ("--lost-after", "12", *PACED)
    with ElasticJob(tmp_path, nodes, args, launcher=launcher) as job:
        job.start("n0", "n1")
        job.wait(lambda: job.safe_copy() > 2)
        stopped = processes(job, victim)[: 1 if agent_only else None]
        for process in stopped:
            process.suspend()
        time.sleep(30)
        for process in stopped:
            process.resume()
        took = job.wait(lambda: len(job.rounds()) > 1 and "2 ranks" in job.rounds()[-1], 120)
        print(f"both train again {took:.1f} s later")
        job.wait(partial(more_lines, job, job.lines() + 20), 60)
        print("\n".join(job.rounds()))
        assert job.told("lost rank", *({"n0", "n1"} - {victim}))
        check_one_half_wrote(job)
        last = max(iteration for iteration, _ in job.losses())
    check_losses(job, forks, tmp_path, TWO, last)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_that_trained_alone_is_fenced_out_by_the_one_that_came_while_it_was_stopped(forks, tmp_path):
    """Its rank waits for nobody, so that nothing but the fence ends it."""
    args = words(tmp_path, TWO, TWO_NODES, 100_000, 5)
    with ElasticJob(tmp_path, "1:2", args, launcher=PACED[2:]) as job:
        job.start("n0", "n1")
        job.wait(partial(more_lines, job, 6))
        job.kill("n1")
        job.wait(lambda: len(job.rounds()) == 2)
        job.wait(partial(more_lines, job, job.lines() + 6))
        stopped = processes(job, "n0")
        for process in stopped:
            process.suspend()
        job.start("n1")
        job.wait(lambda: "1 ranks on n1" in job.rounds()[-1], 120)
        job.wait(partial(more_lines, job, job.lines() + 2), 60)
        for process in stopped:
            process.resume()
        took = job.wait(lambda: job.told("this round is over", "n0"), 10)
        print(f"fenced out {took:.1f} s after it went on")
        job.wait(lambda: "2 ranks" in job.rounds()[-1], 120)
        job.wait(partial(more_lines, job, job.lines() + 8), 60)
        print("\n".join(job.rounds()))
        check_one_half_wrote(job)
        last = max(iteration for iteration, _ in job.losses())
    check_losses(job, forks, tmp_path, TWO, last)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(os.geteuid() != 0, reason="links need root")
@pytest.mark.parametrize("seconds", [20, 60, 600])
@pytest.mark.parametrize("victim", ["n0", "n1"])
def test_a_node_that_is_cut_off_writes_nothing_and_says_why(forks, tmp_path, victim, seconds):
    args = words(tmp_path, TWO, TWO_NODES, 100_000, 10)
    launcher = ("--lost-after", "12", *PACED)
    with Links("n0", "n1") as links, ElasticJob(tmp_path, "1:2", args, links=links, launcher=launcher) as job:
        job.start("n0", "n1")
        job.wait(lambda: job.safe_copy() > 2)
        links.cut(victim)
        cut_at = time.monotonic()
        job.wait(lambda: "1 ranks" in job.rounds()[-1], 60)
        while time.monotonic() - cut_at < min(seconds, 110):
            time.sleep(0.1)
        if seconds < 120:
            links.mend(victim)
        agent = job.agents[victim]
        deadline = cut_at + 120
        while agent.poll() is None and "2 ranks" not in job.rounds()[-1]:
            assert time.monotonic() < deadline, job.said(victim)[-4000:]
            time.sleep(0.1)
        print(f"{time.monotonic() - cut_at:.1f} s after the cut: exit code {agent.poll()}")
        print(job.said(victim)[-1500:])
        if agent.poll() is not None:
            assert job.told("the store at .* is gone", victim)
        job.wait(partial(more_lines, job, job.lines() + 5), 60)
        print("\n".join(job.rounds()))
        check_one_half_wrote(job)
        last = max(iteration for iteration, _ in job.losses())
    check_losses(job, forks, tmp_path, TWO, last)
