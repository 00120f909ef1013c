"""What one rank alone finds wrong ends all ranks, with its message and exit code."""

from __future__ import annotations

import re

import pytest

from megatron_hexi.plan import write_plan
from tests.megatron.conftest import job
from tests.megatron.launch import launch
from tests.megatron.test_uneven_training import MODEL, THREE_AND_ONE
from tests.support.covering import covering

RANKS = 4
DATA = (*MODEL, "--train-iters", "1", "--hexi-platform", "cpu", "--hexi-plan", "plan.yaml")
PATHS = {
    "record, which rank 0 writes": (
        0,
        ("--hexi-record", "."),
        ".: is a folder; give the name of a file in it",
    ),
    "metrics, which the last rank writes": (
        3,
        ("--hexi-metrics", "."),
        ".: is a folder; give the name of a file in it",
    ),
    "metrics of a rank in between": (
        2,
        ("--hexi-metrics", "{rank}/metrics.jsonl"),
        "2/metrics.jsonl: cannot be written (Not a directory); choose another name",
    ),
}


@pytest.fixture
def folder(tmp_path):
    write_plan(THREE_AND_ONE, tmp_path / "plan.yaml")
    (tmp_path / "2").touch()
    for rank in (0, 1, 3):
        (tmp_path / str(rank)).mkdir()
    return tmp_path


def check(outputs: list[str], who: int, said: str) -> None:
    for rank, output in enumerate(outputs):
        [line] = [line for line in output.splitlines() if line.startswith("hexi: error:")]
        assert line.startswith(f"hexi: error: [rank {rank}] ")
        assert said in line
        assert (f"rank {who} on host" in line) == (rank != who)
        assert "Traceback" not in output


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_one_rank_cannot_write_ends_all(name, forks, folder):
    who, words, said = PATHS[name]
    # Ranks that have not ended some seconds after the first has are killed, and have no exit code then.
    outcome = forks.launch(folder, ranks=RANKS, args=[*DATA, *words], timeout=250)
    assert outcome.codes == [2] * RANKS
    check(outcome.output, who, said)


#: What a rank says that has none.
LACKED = {
    "plan": "elsewhere.yaml: cannot be read (No such file or directory)",
    "kernel": "nothing of the kind is here; give another",
    "session": "nothing of the kind is here; give another",
}


@pytest.mark.parametrize(("who", "what"), covering([0, 2], LACKED))
def test_what_one_rank_lacks_ends_all(who, what, forks, folder):
    outcome = forks.launch(
        folder, ranks=RANKS, args=[str(who), what, *DATA], entry="tests.megatron.odd_rank", timeout=250
    )
    assert outcome.codes == [2] * RANKS
    check(outcome.output, who, LACKED[what])


def test_what_all_ranks_find_wrong_is_said_once_by_each(forks, folder):
    outcome = forks.launch(
        folder, ranks=RANKS, args=["all", "plan", *DATA], entry="tests.megatron.odd_rank", timeout=250
    )
    assert outcome.codes == [2] * RANKS
    for rank, output in enumerate(outcome.output):
        [line] = [line for line in output.splitlines() if line.startswith("hexi: error:")]
        assert line.startswith(f"hexi: error: [rank {rank}] elsewhere.yaml: cannot be read")


def test_a_default_group_that_is_bound_to_a_device_is_refused_by_name(forks, folder):
    outcome = forks.launch(
        folder, ranks=RANKS, args=["all", "bound device", *DATA], entry="tests.megatron.odd_rank", timeout=250
    )
    assert outcome.codes == [2] * RANKS
    for output in outcome.output:
        assert "bound to the device cuda:0" in output
        assert "call init_process_group without device_id" in output
        assert "Traceback" not in output


def test_under_torchrun_the_rank_that_finds_it_says_it_alone(forks, folder):
    words = [*MODEL, "--train-iters", "1", "--hexi-metrics", "."]
    result = launch(folder, ranks=2, args=words, python=forks.python)
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("hexi: error:"))
    assert line.startswith("hexi: error: [rank 1] .: is a folder")
    assert "Traceback (most recent call last)" not in result.stderr.split("hexi: error:")[0]
    assert result.returncode != 0
    assert re.search(r"exitcode\s*: 2", result.stderr)


def test_a_part_of_the_data_without_documents_ends_all(forks, folder, documents):
    """Megatron would count epochs of it for ever, on the rank that builds data sets."""
    words = ["--hexi-plan", "plan.yaml", "--hexi-platform", "cpu", "--split", "9999,1,0", "--eval-iters", "1"]
    words += ["--train-iters", "1"]
    outcome = forks.launch(folder, ranks=RANKS, args=[*job(documents), *words], timeout=250)
    assert outcome.codes == [2] * RANKS
    check(outcome.output, 0, "--split: of the 400 documents of")
