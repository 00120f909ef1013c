"""Ranks of a round that is over write nothing and say why, whoever of store and folder tells it first."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_hexi.elastic.store import (
    JOB_VARIABLE,
    ROUND_VARIABLE,
    STORE_VARIABLE,
    PresentRound,
    change_present,
)
from megatron_hexi.elastic.training import fencing
from megatron_hexi.elastic.training.fencing import FENCE_PATCHES, publish, round_folder, take_save
from megatron_hexi.errors import HexiError


class Half:
    """The rounds of one half of a job in this process: rank 0 of each, one after the other.

    Args:
        job: its store; both halves of a job have the same.
    """

    def __init__(self, save: Path, job: dist.Store, patch: pytest.MonkeyPatch) -> None:
        self._save, self._job, self._patch = save, job, patch

    def be(self, name: str, present: str | None = None) -> None:
        """Be a rank of a round, while the store names another or the same."""
        change_present(self._job, lambda _: PresentRound(present or name, ("a",)))
        self._patch.setenv(ROUND_VARIABLE, name)
        self._patch.setattr(fencing, "whole_store", lambda: self._job)

    def begin(self, name: str) -> Path:
        """Begin a round; returns its folder."""
        self.be(name)
        take_save(self._save, self._job)
        return round_folder(self._save)


@pytest.fixture
def half(tmp_path, monkeypatch):
    """Makes halves that save in one folder."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(os, "_exit", sys.exit)
    return lambda job: Half(tmp_path / "save", job, monkeypatch)


def write(folder: Path, iteration: int, text: str) -> tuple[Path, Path]:
    """Write a checkpoint in the folder of a round; returns where it is, and its place."""
    begun, target = folder / f"iter_{iteration:07d}", folder.parent / f"iter_{iteration:07d}"
    begun.mkdir()
    target.mkdir(exist_ok=True)  # as Megatron does
    (begun / "weights").write_text(text)
    return begun, target


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_rank_of_a_round_that_is_over_writes_nothing_and_says_why(half, capsys, monkeypatch):
    written: list[str] = []
    one = half(dist.HashStore())
    guarded = FENCE_PATCHES[0].build(lambda what, _: written.append(what))
    one.be("own")
    guarded("while present", "folder")
    one.be("own", present="later")
    with pytest.raises(SystemExit) as ended:
        guarded("afterwards", "folder")
    assert (ended.value.code, written) == (75, ["while present"])
    assert "hexi: elastic: rank 3: this round is over" in capsys.readouterr().err
    monkeypatch.delenv(ROUND_VARIABLE)
    guarded("in a job that is not elastic", "folder")
    assert len(written) == 2


def test_a_rank_whose_store_is_cut_off_writes_nothing_and_says_why(monkeypatch, capsys):
    """Between it and the store is a process that stops passing bytes on, and ends."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    change_present(dist.PrefixStore("hexi.job", store), lambda _: PresentRound("own", ("a",)))
    code = (
        "import socket, sys, threading\n"
        "door = socket.create_server(('127.0.0.1', 0)); print(door.getsockname()[1], flush=True)\n"
        "def copy(a, b):\n"
        "    while block := a.recv(65536): b.sendall(block)\n"
        "while True:\n"
        "    one, other = door.accept()[0], socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "    for ends in ((one, other), (other, one)): threading.Thread(target=copy, args=ends).start()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(store.port)], stdout=subprocess.PIPE) as door:
        assert door.stdout is not None
        for name, value in (
            (STORE_VARIABLE, f"127.0.0.1:{int(door.stdout.readline())}"),
            (JOB_VARIABLE, "job"),
            (ROUND_VARIABLE, "own"),
            ("RANK", "3"),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "_exit", sys.exit)
        fencing.ask_fence()
        os.kill(door.pid, signal.SIGSTOP)
        threading.Timer(0.5, door.kill).start()
        begun = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            fencing.ask_fence()
    assert time.monotonic() - begun > 0.4
    assert ended.value.code == 75
    assert "rank 3: the job's store does not answer" in capsys.readouterr().err


def test_each_round_takes_the_folder_of_checkpoints_from_the_one_before(half, tmp_path):
    one = half(dist.HashStore())
    first = one.begin("first")
    publish(*write(first, 10, "whole"))
    write(first, 20, "torn")
    second = one.begin("second")
    assert names(tmp_path / "save") == [second.name, "iter_0000010", "iter_0000020"]
    assert names(second) == []
    publish(*write(second, 20, "whole"))
    assert (tmp_path / "save/iter_0000020/weights").read_text() == "whole"


def test_what_a_rank_was_writing_when_it_was_stopped_gets_nowhere(half, tmp_path, capsys):
    one = half(dist.HashStore())
    late = one.begin("first")
    begun, target = write(late, 10, "late")
    file = (begun / "more").open("w")
    second = one.begin("second")
    publish(*write(second, 10, "present"))
    file.write("late")
    file.close()
    with pytest.raises(FileNotFoundError):
        publish(begun, target)
    with pytest.raises(FileNotFoundError):
        (begun / "further").open("w")
    one.be("first", present="second")
    with pytest.raises(SystemExit) as ended:
        fencing._check_held(late)
    assert ended.value.code == 75
    assert "this round is over" in capsys.readouterr().err
    assert names(target) == ["weights"]
    assert (target / "weights").read_text() == "present"


def test_a_rank_that_was_stopped_as_its_round_began_takes_nothing_from_a_later_one(half, tmp_path):
    one = half(dist.HashStore())
    one.begin("first")
    third = one.begin("third")
    one.be("second", present="third")
    with pytest.raises(SystemExit):
        take_save(tmp_path / "save", one._job)
    publish(*write(third, 10, "present"))
    fourth = one.begin("fourth")
    assert names(tmp_path / "save") == [fourth.name, "iter_0000010"]


def test_of_two_jobs_the_one_that_began_later_writes_and_the_other_ends(half, tmp_path, capsys):
    """A half whose host of the store is cut off, and the job that was started again meanwhile."""
    old, new = half(dist.HashStore()), half(dist.HashStore())
    held = old.begin("old-1")
    publish(*write(held, 10, "old"))
    begun, target = write(held, 20, "old")
    present = new.begin("new-1")
    with pytest.raises(FileNotFoundError):
        publish(begun, target)
    with pytest.raises(HexiError, match="another job has begun to write there; end one of the two"):
        old.begin("old-2")
    publish(*write(present, 20, "new"))
    later = new.begin("new-2")
    assert names(tmp_path / "save") == [later.name, "iter_0000010", "iter_0000020"]
    assert (target / "weights").read_text() == "new"


def test_of_many_jobs_that_begin_at_once_one_is_left(tmp_path):
    """One that has taken the folder may lose it to the next; the last of them has ended without a word."""
    words = [sys.executable, "-m", "tests.unit.elastic.contenders", str(tmp_path / "save")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    codes = done.stdout.split()
    assert set(codes) <= {"0", "75"}, done.stderr
    [left] = names(tmp_path / "save")
    assert codes[int(left[-1])] == "0"


def test_a_folder_that_cannot_be_written_is_one_line(half, tmp_path):
    (tmp_path / "save").write_text("")
    with pytest.raises(HexiError, match=r"--save .*save: cannot be written \(Not a directory\); make room"):
        half(dist.HashStore()).begin("first")


def test_a_checkpoint_that_a_kill_has_left_torn_is_replaced(half, tmp_path):
    folder = half(dist.HashStore()).begin("first")
    torn = tmp_path / "save/iter_0000010"
    torn.mkdir()
    (torn / "weights").write_text("torn")
    (torn / "more").write_text("torn")
    publish(*write(folder, 10, "whole"))
    assert names(torn) == ["weights"]
    assert names(folder) == []
    shutil.rmtree(folder)
