"""Jobs that outlive their nodes: by themselves they go on with those left, and take in those that come."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron_hexi.plan import JobTerms, Plan, write_plan
from tests.megatron.elastic import ElasticJob, tear, whole
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_uneven_training import MODEL, THREE_AND_ONE, one_domain

TWO = one_domain((70, (0, 3)), (57, (3, 6)))
#: The rate must not depend on how long a test trains.
SCHEDULE = ("--lr-decay-iters", "1000", "--log-interval", "1000")


def words(folder: Path, plan: Plan, nodes: dict[str, float], iterations: int, save: int) -> list[str]:
    """The arguments of a job, and its files: nodes with one CPU each, some slower."""
    text = (REPOSITORY / "scripts/testbed/four-equal.yaml").read_text()
    # Links so fast that no GPU is better left out.
    network = "network: {bandwidth_gb_s: 100, latency_us: 0.1}\n" + text[text.index("devices:") :]
    entries = "".join(f"- {{name: {n}, gpu: cpu-core, gpus: 1, speed: {s}}}\n" for n, s in nodes.items())
    (folder / "cluster.yaml").write_text(f"name: small\nnodes:\n{entries}{network}")
    write_plan(replace(plan, job=JobTerms(pipeline_parallel=1)), folder / "plan.yaml")
    ours = ["--hexi-plan", "plan.yaml", "--hexi-cluster", "cluster.yaml", "--hexi-platform", "cpu"]
    saving = ["--save", "checkpoints", "--save-interval", str(save), "--train-iters", str(iterations)]
    return [*MODEL, *SCHEDULE, *ours, *saving]


def check_losses(job: ElasticJob, forks, folder: Path, plan: Plan, iterations: int) -> None:
    """Every loss, of each time that an iteration was done, is that of an undisturbed training."""
    args = [*MODEL, *SCHEDULE, "--train-iters", str(iterations)]
    still = forks.train(folder / "still", ranks=plan.ranks, args=args, plan=plan).losses
    done = [(i, loss) for i, loss in job.losses() if i <= iterations]
    assert {i for i, _ in done} == set(range(1, iterations + 1))
    assert [loss for _, loss in done] == pytest.approx([still[i - 1] for i, _ in done], rel=1e-5)


def test_the_one_that_is_left_goes_on_from_the_last_whole_checkpoint(forks, tmp_path):
    args = words(tmp_path, TWO, {"n0": 1.0, "n1": 1.0}, 40, 4)
    with ElasticJob(tmp_path, "1:2", args) as job:
        job.start("n0", "n1")
        job.wait(lambda: job.lines() >= 10)
        job.kill("n1")
        torn = tear(tmp_path / "checkpoints")
        survivor_named = job.wait(lambda: job.told("lost rank 1 on host", "n0"), 60)
        before = job.lines()
        took = job.wait(lambda: job.lines() > before, 120)
        print(f"named {survivor_named:.1f} s after the kill, went on {took:.1f} s later")
        assert job.wait_for_end() == {"n0": 0}
        [first, second] = job.told("round")
        assert "2 ranks on n0, n1" in first
        assert "1 ranks on n0; without n1-0" in second
        assert f"goes on from iteration {torn - 4}," in second
        check_losses(job, forks, tmp_path, TWO, 40)


def said_more(job: ElasticJob, than: int) -> bool:
    return len(job.told("has ended")) > than


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(2))
def test_five_losses_in_a_row_and_nodes_that_come_back(forks, tmp_path, seed):
    """Nodes are killed, ranks killed and stopped, a checkpoint is torn; all are back at the end."""
    chance = random.Random(seed)
    nodes = {"n0": 1.0, "n1": 1.0, "n2": 1.0, "slow": 0.5}
    args = words(tmp_path, THREE_AND_ONE, nodes, 100_000, 5)
    with ElasticJob(tmp_path, "1:4", args, launcher=["--lost-after", "12"]) as job:
        job.start(*nodes)
        job.wait(lambda: job.lines() >= 11)
        griefs = ["node", "rank", "stop", "node", "node"]
        chance.shuffle(griefs)
        for grief in griefs:
            victim = chance.choice(sorted(job.agents))
            survivors = job.agents.keys() - {victim}
            told = {name: len(job.told("lost rank", name)) for name in survivors}
            if grief == "node":
                job.kill(victim)
                if len(whole(tmp_path / "checkpoints")) > 1:
                    print(f"torn: iteration {tear(tmp_path / 'checkpoints')}")
            else:
                os.kill(job.rank(victim).pid, signal.SIGKILL if grief == "rank" else signal.SIGSTOP)
            before = len(job.told("has ended"))
            took = job.wait(partial(said_more, job, before))
            print(f"{grief} {victim}: next iteration {took:.1f} s after it; load {os.getloadavg()[0]:.0f}")
            if len(survivors) > 1:
                assert all(len(job.told("lost rank", name)) > told[name] for name in survivors)
        gone = nodes.keys() - job.agents.keys()
        job.start(*gone)
        job.wait(lambda: f"{len(nodes)} ranks" in job.told("round")[-1])
        before = job.lines()
        job.wait(lambda: job.lines() > before + 5)
        last = max(i for i, _ in job.losses())
    check_losses(job, forks, tmp_path, THREE_AND_ONE, min(last, 300))
    print("\n".join(job.told("round")))
