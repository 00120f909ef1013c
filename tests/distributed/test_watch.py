"""A rank that is gone is named by each of the others, and a rank's mistake ends all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_hexi.lab.testbed.isolation import find_isolation
from tests.megatron.forked import Forks
from tests.megatron.launch import environment
from tests.support.covering import covering
from tests.support.testbed import pair

RANKS = 3
#: The job's time-out. How soon ranks end after it is measured where it means something, on request:
#: tests/megatron/test_lost_ranks.py. Here they must end at all, which `watched_rank` waits a minute for.
TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Ended:
    """How one rank ended: exit code, what it printed."""

    code: int
    log: str

    @property
    def error(self) -> str:
        [line] = [line for line in self.log.splitlines() if line.startswith("hexi: error:")]
        return line


def ranks_with(forks: Forks, who: int, how: str, folder: Path) -> dict[int, Ended]:
    """Run ranks of which one comes to grief; how those ended that did."""
    command = [
        str(forks.python),
        "-m",
        "tests.support.watched_rank",
        str(RANKS),
        str(who),
        how,
        str(TIMEOUT_S),
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=250, check=True
    )
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    return {rank: Ended(code, (folder / f"rank-{rank}.log").read_text()) for rank, code in ended}


@pytest.mark.parametrize(("who", "how"), covering([0, 1], ["killed", "stopped"]))
def test_a_rank_that_is_gone_is_named_by_every_survivor(who, how, forks, tmp_path):
    ended = ranks_with(forks, who, how, tmp_path)
    survivors = {rank: end for rank, end in ended.items() if rank != who}
    assert len(survivors) == RANKS - 1
    for rank, end in survivors.items():
        assert f"[rank {rank}] lost rank {who} on host " in end.error
        assert "since " in end.error
        assert "This rank was in " in end.error
        assert "Traceback" not in end.log
        assert end.code == 1


def test_a_mistake_of_one_rank_ends_all_with_its_message_and_exit_code(forks, tmp_path):
    ended = ranks_with(forks, 1, "mistaken", tmp_path)
    assert [ended[rank].code for rank in range(RANKS)] == [2, 2, 2]
    for rank, end in ended.items():
        assert end.error.startswith(f"hexi: error: [rank {rank}] ")
        assert "value 7 is too large; give 6" in end.error
        assert ("rank 1 on host" in end.error) == (rank != 1)
        assert "Traceback" not in end.log


def test_an_exception_of_one_rank_is_told_by_the_others_and_keeps_its_traceback(forks, tmp_path):
    ended = ranks_with(forks, 1, "broken", tmp_path)
    assert [ended[rank].code for rank in range(RANKS)] == [1, 1, 1]
    assert "Traceback" in ended[1].log
    assert ended[1].log.rstrip().endswith("ValueError: nobody expected this")
    for rank in (0, 2):
        assert "rank 1 on host" in ended[rank].error
        assert "ended by ValueError: nobody expected this. This rank was in" in ended[rank].error


def test_a_rank_that_left_in_order_is_not_called_silent(forks, tmp_path):
    ended = ranks_with(forks, 1, "done", tmp_path)
    assert ended[1].code == 0
    assert "hexi: error" not in ended[1].log
    for rank in (0, 2):  # their collective fails all the same
        assert ended[rank].code == 1
        assert "lost rank" not in ended[rank].log


@pytest.mark.skipif(find_isolation() == "none", reason="neither root nor user namespaces: no link can be cut")
def test_a_cut_link_is_named_on_both_sides(tmp_path):
    (tmp_path / "pair.yaml").write_text(pair(memory=1, bandwidth=0.02))
    words = ["run", "pair.yaml", "--speeds", "none", "-o", "run", "--", "-m", "tests.support.watched_rank"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_hexi.cli.main", "testbed", *words, "1", "cut", str(TIMEOUT_S)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "no heartbeat since" in line]
    named = {0: "rank 1 on host", 1: "keeps the job's store"}
    for rank, name in named.items():
        [line] = {line[line.index("hexi: error") :] for line in lines if f"[rank {rank}]" in line}
        assert name in line
    assert done.returncode == 1
