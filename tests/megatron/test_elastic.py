"""Jobs that outlive their nodes: by themselves they go on with those left, and take in those that come."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron_hexi.plan import JobTerms, Plan, write_plan
from tests.megatron.elastic import ElasticJob, tear, whole
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_uneven_training import MODEL, one_domain
from tests.support.links import Links

TWO = one_domain((70, (0, 3)), (57, (3, 6)))
#: The rate must not depend on how long a test trains.
SCHEDULE = ("--lr-decay-iters", "1000", "--log-interval", "1000")


def words(
    folder: Path,
    plan: Plan,
    nodes: dict[str, float],
    iterations: int,
    save: int,
    ranks: dict[str, int] | None = None,
    model: tuple[str, ...] = MODEL,
    usable_gib: float = 3.5,
    link: str = "bandwidth_gb_s: 100, latency_us: 0.1",
) -> list[str]:
    """The arguments of a job, and its files: nodes with one CPU each or more, some slower."""
    ranks = ranks or dict.fromkeys(nodes, 1)
    text = (REPOSITORY / "scripts/testbed/four-equal.yaml").read_text()
    # Links so fast, unless told otherwise, that no GPU is better left out.
    network = f"network: {{{link}}}\n" + text[text.index("devices:") :]
    network = network.replace("usable_gib: 3.5", f"usable_gib: {usable_gib}")
    entries = "".join(
        f"- {{name: {n}, gpu: cpu-core, gpus: {ranks[n]}, speed: {s}}}\n" for n, s in nodes.items()
    )
    (folder / "cluster.yaml").write_text(f"name: small\nnodes:\n{entries}{network}")
    terms = JobTerms(pipeline_parallel=1) if plan.is_repeated else plan.job
    write_plan(replace(plan, job=terms), folder / "plan.yaml")
    ours = ["--hexi-plan", "plan.yaml", "--hexi-cluster", "cluster.yaml", "--hexi-platform", "cpu"]
    saving = ["--save", "checkpoints", "--save-interval", str(save), "--train-iters", str(iterations)]
    return [*model, *SCHEDULE, *ours, *saving]


def check_losses(
    job: ElasticJob, forks, folder: Path, plan: Plan, iterations: int, model: tuple[str, ...] = MODEL
) -> None:
    """Every loss, of each time that an iteration was done, is that of an undisturbed training."""
    args = [*model, *SCHEDULE, "--train-iters", str(iterations)]
    still = forks.train(folder / "still", ranks=plan.ranks, args=args, plan=plan).losses
    done = [(i, loss) for i, loss in job.losses() if i <= iterations]
    assert {i for i, _ in done} == set(range(1, iterations + 1))
    assert [loss for _, loss in done] == pytest.approx([still[i - 1] for i, _ in done], rel=1e-5)


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param(("--copy-interval", "1"), id="memory"),
        pytest.param((), id="checkpoint"),
    ],
)
@pytest.mark.slow  # what it does in stages, test_elastic_stages.py does always
def test_the_one_that_is_left_goes_on_from_what_is_whole(forks, tmp_path, copies):
    args = words(tmp_path, TWO, {"n0": 1.0, "n1": 1.0}, 60, 20)
    with ElasticJob(tmp_path, "1:2", args, launcher=copies) as job:
        job.start("n0", "n1")
        job.wait(lambda: job.lines() > 20 and (job.safe_copy() > 20 or not copies))
        safe = job.safe_copy()
        job.kill("n1")
        torn = tear(tmp_path / "checkpoints")
        survivor_named = job.wait(lambda: job.told("lost rank 1 on host", "n0"), 60)
        before = job.lines()
        took = job.wait(lambda: job.lines() > before, 120)
        print(f"named {survivor_named:.1f} s after the kill, went on {took:.1f} s later")
        assert job.wait_for_end() == {"n0": 0}
        [first, second] = job.rounds()
        assert re.search("2 ranks on (n0, n1|n1, n0);", first)
        assert "1 ranks on n0; without n1-0" in second
        [resumed, where] = re.findall(r"goes on from iteration (\d+)( in memory)?,", second)[0]
        assert int(resumed) >= safe if copies else int(resumed) == torn - 20
        assert bool(where) == bool(copies)
        [begin] = re.findall(r"iteration (\d+) begins with sample (\d+) of the one order", job.said("n0"))
        assert begin == (str(int(resumed) + 1), str(int(resumed) * 4))  # the global batch
        assert re.search(r"\| round: 2 \| without: n1-0 \| goodput: [\d.]+% \|", job.said("n0"))
        assert len(job.folders_in_memory()) == (1 if copies else 0)  # the killed node's alone
        check_losses(job, forks, tmp_path, TWO, 60)


def said_more(job: ElasticJob, than: int) -> bool:
    return len(job.told("has finished")) > than


#: Two ranks on one node; four nodes.
FIVE = one_domain((26, (0, 2)), (26, (2, 3)), (25, (3, 4)), (25, (4, 5)), (25, (5, 6)))
RANKS = {"duo": 2, "n1": 1, "n2": 1, "slow": 1}
GRIEFS = ("node", "node", "rank", "rank", "stop", "link")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(os.geteuid() != 0, reason="links need root")
@pytest.mark.parametrize("seed", range(5))
def test_six_losses_in_a_row_and_nodes_that_come_back(forks, tmp_path, seed):
    """Thirty in all, at random moments: of a node, a rank, a link."""
    chance = random.Random(seed)
    args = words(tmp_path, FIVE, {"duo": 1.0, "n1": 1.0, "n2": 1.0, "slow": 0.5}, 100_000, 8, RANKS)
    launcher = ["--lost-after", "12", "--script", str(REPOSITORY / "tests/megatron/paced.py")]
    copies = ["--copy-interval", "2"] if seed % 2 else []
    with (
        Links(*RANKS) as links,
        ElasticJob(tmp_path, "1:4", args, RANKS, launcher + copies, links) as job,
    ):
        job.start(*RANKS)
        job.wait(lambda: job.lines() >= 9, 600)
        for grief in chance.sample(GRIEFS, len(GRIEFS)):
            reached = job.lines()
            job.wait(partial(more_lines, job, reached + chance.randrange(3, 20)))
            time.sleep(chance.uniform(0, 0.5))
            hurt(job, links, grief, chance)
            if len(job.agents) == 1:  # nobody is left to miss the last one
                come_back(job, links, RANKS.keys() - job.agents.keys())
        come_back(job, links, RANKS.keys() - job.agents.keys())
        job.wait(partial(more_lines, job, job.lines() + 5))
        last = max(i for i, _ in job.losses())
    print("\n".join(job.rounds()))
    check_losses(job, forks, tmp_path, FIVE, last)


def come_back(job: ElasticJob, links: Links, gone: Set[str]) -> None:
    """Start nodes again, and wait until all ranks train."""
    for name in gone:
        links.mend(name)
    job.start(*gone)
    job.wait(lambda: "5 ranks" in job.rounds()[-1], 600)


def more_lines(job: ElasticJob, than: int) -> bool:
    return job.lines() > than


def hurt(job: ElasticJob, links: Links, grief: str, chance: random.Random) -> None:
    """Do it, and wait until the job has gone on by itself."""
    victim = chance.choice(sorted(job.agents))
    survivors = sorted(job.agents.keys() - {victim})
    told = {name: len(job.told("lost rank", name)) for name in survivors}
    before = len(job.told("has finished"))
    if grief == "node":
        job.kill(victim)
    elif grief == "link":
        links.cut(victim)
    else:
        os.kill(job.rank(victim).pid, signal.SIGKILL if grief == "rank" else signal.SIGSTOP)
    took = job.wait(partial(said_more, job, before), 600)
    load = os.getloadavg()[0]
    print(f"{grief} {victim}: next iteration {took:.1f} s after it; load {load:.0f}", flush=True)
    if grief == "link":
        print(f"the agent there has ended by itself: {job.agents[victim].poll()}")
        job.kill(victim)
    assert all(len(job.told("lost rank", name)) > told[name] for name in survivors)


@pytest.fixture
def small_disk(tmp_path):
    """A folder for checkpoints on a file system of its own, which can be full."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "hexi", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="disks need root")
def test_a_full_disk_ends_the_job_and_another_goes_on_where_there_is_room(forks, tmp_path, small_disk):
    folders = [tmp_path / "full", tmp_path / "roomy"]
    jobs = []
    for folder in folders:
        folder.mkdir()
        args = words(folder, TWO, {"n0": 1.0, "n1": 1.0}, 30, 10)
        args[args.index("--save") + 1] = str(small_disk)
        jobs.append((folder, "2:2", args))
    ballast = small_disk / "ballast"
    with ElasticJob(*jobs[0]) as job:
        job.start("n0", "n1")
        job.wait(lambda: whole(small_disk))
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        assert 2 in job.wait_for_end().values()
        assert len(job.rounds()) == 1
        told = job.said()
        assert "the checkpoint of iteration 20 cannot be written (No space left on device); make room" in told
    ballast.unlink()
    with ElasticJob(*jobs[1]) as job:
        job.start("n0", "n1")
        assert set(job.wait_for_end().values()) == {0}
        assert [iteration for iteration, _ in job.losses()] == list(range(11, 31))
    assert [int(path.name[-2:]) for path in whole(small_disk)] == [10, 20, 30]
