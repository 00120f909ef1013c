"""Halves of a job, or two jobs, with one folder of checkpoints: one writes, the other ends and says why."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.megatron.elastic import ElasticJob, whole
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_clocks_and_cuts import TWO_NODES, check_one_half_wrote
from tests.megatron.test_elastic import TWO, check_losses, more_lines, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPTS = REPOSITORY / "tests/megatron"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stopped_ranks(job: ElasticJob) -> list[str]:
    """The nodes whose rank is stopped."""
    ranks = {name: job.rank_or_none(name) for name in job.agents}
    return [name for name, rank in ranks.items() if rank and rank.status() == psutil.STATUS_STOPPED]


def test_a_node_that_stops_as_it_saves_leaves_the_checkpoint_of_the_others_alone(forks, tmp_path):
    args, save = words(tmp_path, TWO, TWO_NODES, 100_000, 10), tmp_path / "checkpoints"
    launcher = ("--lost-after", "6", "--script", str(SCRIPTS / "stopped_save.py"))
    with ElasticJob(tmp_path, "1:2", args, launcher=launcher) as job:
        job.start("n0", "n1")
        job.wait(lambda: whole(save))
        (tmp_path / "stop").touch()
        job.wait(lambda: stopped_ranks(job))
        [victim] = stopped_ranks(job)
        agent, rank = psutil.Process(job.agents[victim].pid), job.rank(victim)
        agent.suspend()  # it would kill the rank
        [begun] = save.glob(".hexi-round-*/iter_*")
        assert (begun / "metadata.json").exists()
        place = save / begun.name
        job.wait(lambda: (place / "metadata.json").exists(), 60)
        written = contents(place)
        rank.resume()
        job.wait(lambda: job.told("rank 0: this round is over", victim), 20)
        assert contents(place) == written
        agent.resume()
        job.wait(lambda: "2 ranks" in job.rounds()[-1], 60)
        job.wait(partial(more_lines, job, job.lines() + 5), 60)
        assert contents(place) == written
        check_one_half_wrote(job)
        last = max(iteration for iteration, _ in job.losses())
    check_losses(job, forks, tmp_path, TWO, last)


def test_a_job_that_is_started_again_elsewhere_ends_the_half_that_is_left(forks, tmp_path):
    """Each has a store of its own, so that neither knows of the other but by the folder."""
    save = tmp_path / "checkpoints"
    folders = {name: tmp_path / name for name in ("old", "new")}
    for folder in folders.values():
        folder.mkdir()
    args = {name: words(folder, TWO, TWO_NODES, 100_000, 10) for name, folder in folders.items()}
    for arguments in args.values():
        arguments[arguments.index("--save") + 1] = str(save)
    paced = ("--script", str(SCRIPTS / "paced.py"))
    with (
        ElasticJob(folders["old"], "1:2", args["old"], launcher=paced) as old,
        ElasticJob(folders["new"], "1:2", args["new"], launcher=paced) as new,
    ):
        old.start("n0", "n1")
        old.wait(lambda: whole(save))
        old.kill("n1")
        old.wait(lambda: len(old.rounds()) == 2)
        old.wait(partial(more_lines, old, old.lines() + 2))
        new.start("n1")
        new.wait(new.rounds, 120)
        assert old.wait_for_end(60) == {"n0": 2}
        assert old.told("this round is over.*another job, writes to")
        assert "another job has begun to write there; end one of the two" in old.said()
        new.wait(lambda: int(whole(save)[-1].name[-3:]) >= old.lines() + 20, 120)
        done = [iteration for iteration, _ in new.losses()]
        assert done == list(range(done[0], done[-1] + 1))
        assert len(new.rounds()) == 1
    check_losses(old, forks, folders["old"], TWO, max(iteration for iteration, _ in old.losses()))
