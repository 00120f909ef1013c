"""After a node is killed, or comes back, nodes send each other what the two plans need, no more."""

from __future__ import annotations

import fcntl
from functools import partial
from pathlib import Path

import pytest

from tests.megatron.copied_bytes import check_least, files_held
from tests.megatron.elastic import ElasticJob
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_elastic import check_losses, words
from tests.megatron.test_elastic_stages import FOUR_LAYERS, SLOW_LINK, TWO_STAGES, staged
from tests.megatron.test_moving_layers import three
from tests.megatron.test_restart_seconds import copied_after

CASES = {
    # Without one of these, two nodes have two layers each.
    "stages": (three((0, 1), (1, 2), (2, 4)), {"n0": 1, "n1": 1, "n2": 1}),
    # Tensor-parallel ranks, whose layers go to nodes of one rank, and come back.
    "units": (TWO_STAGES, {"duo": 2, "n1": 1, "n2": 1}),
}
#: So long that the copy which a round has loaded is still there when it is looked at.
INTERVAL = 40
#: By which a tensor's range, an archive of torch's, is longer than the tensor.
AROUND_MB = 0.002


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def whole_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.distcp")}


def loaded_again(job: ElasticJob, rounds: int) -> bool:
    return len(job.moved()) > rounds


def is_kept(folder: Path) -> bool:
    """Whether the agent whose folder for copies this is runs."""
    with (folder / "lock").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_bytes(job: ElasticJob) -> None:
    """Compare what has come to the nodes of the present round with the least, and with what the log says."""
    saved, loaded = job.decisions()[-2:]
    copy = loaded["copy"]
    held = files_held(copy["files"], saved)
    survivors = [node for node in loaded["nodes"] if node in held]
    inside = Path(copy["name"], f"iter_{copy['iteration']:07d}")
    folders = [folder / inside for folder in job.folders_in_memory() if is_kept(folder)]
    alone = {
        file
        for file in set.union(*held.values())
        if len([node for node in survivors if file in held[node]]) == 1
    }
    there = [file for node in survivors for file in held[node]]
    # The agents fetch what only one node holds, once and whole; the ranks train meanwhile.
    job.wait(lambda: sum(len(whole_files(folder)) for folder in folders) >= len(there) + len(alone), 20)
    found = [file for folder in folders for file in whole_files(folder)]
    assert sorted(found) == sorted([*there, *alone])
    ranges = [size for folder in folders for name, size in sizes(folder).items() if ".distcp.at-" in name]
    small = sum(size for name, (size, *_) in copy["files"].items() if not name.endswith(".distcp"))
    came = sum(ranges) + small * len(
        set(loaded["nodes"]) - held.keys()
    )  # a node that comes has no small file
    said, least = job.moved()[-1]
    way = f"{', '.join(saved['nodes'])} to {', '.join(loaded['nodes'])}"
    print(f"{way}: {came / 1e6:.3f} MB came to load; then {len(alone)} of {len(copy['files'])} files")
    assert said == pytest.approx(came / 1e6, abs=0.001)
    most = check_least(least, folders[0], held, loaded)
    assert least - 0.001 < sum(ranges) / 1e6 < most + AROUND_MB * len(ranges)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_nodes_send_what_two_plans_need(forks, tmp_path, name):
    stages, ranks = CASES[name]
    plan = staged(stages)
    nodes = dict.fromkeys(ranks, 1.0)
    args = words(tmp_path, plan, nodes, 100_000, 1000, ranks, FOUR_LAYERS, 1.5082, SLOW_LINK)
    launcher = ("--copy-interval", str(INTERVAL), "--script", str(REPOSITORY / "tests/megatron/paced.py"))
    with ElasticJob(tmp_path, "2:3", args, ranks, launcher) as job:
        job.start(*ranks)
        for victim in ranks:
            for change in (job.kill, job.start):
                job.wait(partial(copied_after, job, job.safe_copy()))
                rounds = len(job.moved())
                change(victim)
                job.wait(partial(loaded_again, job, rounds))
                check_bytes(job)
        last = max(iteration for iteration, _ in job.losses())
    check_losses(job, forks, tmp_path, plan, last, FOUR_LAYERS)
