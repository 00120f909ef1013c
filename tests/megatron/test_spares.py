"""A spare node waits without a part in the job, and takes the place of a node that is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import replace
from functools import partial

import pytest

from tests.megatron.elastic import ElasticJob
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_elastic import TWO, check_losses, more_lines, said_more, words


def test_a_spare_takes_the_place_of_a_lost_node(forks, tmp_path):
    plan = replace(TWO, gpus=(0, 1))
    args = words(tmp_path, plan, {"n0": 1.0, "n1": 1.0, "extra": 1.0}, 60, 1000)
    with ElasticJob(tmp_path, "1:2", args, launcher=("--copy-interval", "1"), spares=("extra",)) as job:
        job.start("extra", "n0", "n1")
        job.wait(lambda: job.safe_copy() > 5)
        job.kill("n1")
        before = job.lines()
        took = job.wait(lambda: job.lines() > before + 1)
        print(f"the spare trained {took:.1f} s after the kill")
        assert job.wait_for_end() == {"n0": 0, "extra": 0}
        [first, second] = job.rounds()
        assert re.search(r"2 ranks on (n0, n1|n1, n0);(?!.*without)", first)
        assert re.search(r"2 ranks on (n0, extra|extra, n0); without n1-0", second)
        assert re.search(r"goes on from iteration \d+ in memory", second)
        assert job.told("takes part: 1 of 2 nodes are left", "extra")
        check_losses(job, forks, tmp_path, plan, 60)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(3))
def test_two_nodes_train_through_six_losses_beside_two_spares(forks, tmp_path, seed):
    chance = random.Random(seed)
    plan = replace(TWO, gpus=(0, 1))
    nodes = {"n0": 1.0, "n1": 1.0, "e0": 1.0, "e1": 0.7}
    args = words(tmp_path, plan, nodes, 100_000, 1000)
    launcher = ("--copy-interval", "1", "--script", str(REPOSITORY / "tests/megatron/paced.py"))
    with ElasticJob(tmp_path, "1:2", args, launcher=launcher, spares=("e0", "e1")) as job:
        job.start(*nodes)
        job.wait(lambda: job.lines() > 5)
        for grief in chance.sample(("node", "node", "node", "rank", "rank", "spare"), 6):
            training = set(re.findall(r"ranks on (\w+), (\w+)[;, ]", job.rounds()[-1])[0])
            others = sorted(nodes.keys() - training)
            victim = chance.choice(others if grief == "spare" else sorted(training))
            ended, rounds = len(job.told("has finished")), len(job.rounds())
            if grief == "rank":
                os.kill(job.rank(victim).pid, signal.SIGKILL)
            else:
                job.kill(victim)
            if grief != "spare":
                took = job.wait(partial(said_more, job, ended))
                print(
                    f"{grief} {victim}: next iteration {took:.1f} s after it; {job.rounds()[-1]}", flush=True
                )
                assert "2 ranks on" in job.rounds()[-1]
            reached = job.lines()
            job.wait(partial(more_lines, job, reached + 10))
            assert len(job.rounds()) == rounds + (grief != "spare")
            if grief != "rank":
                job.start(victim)
                time.sleep(5)
        last = max(iteration for iteration, _ in job.losses())
    check_losses(job, forks, tmp_path, plan, last)
