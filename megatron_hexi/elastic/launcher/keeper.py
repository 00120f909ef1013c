"""Keeps this node's copies of the training's state, and those of the node before it."""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from megatron_hexi.elastic import say
from megatron_hexi.elastic.copies import CopyBoard, drop_older
from megatron_hexi.elastic.copy_files import copy_folder, copy_path, list_files, pull, serve_files
from megatron_hexi.elastic.launcher.life import StoreThread
from megatron_hexi.elastic.store import DECISION, TRAINING

_PREFIX = "hexi-copies-"
_LOOK_S = 0.2
#: A reason is said when so many looks have failed by it.
_FAILURES = 5


class Keeper(StoreThread):
    """Keeps copies of the training's state for a node's agent, and serves them; a context manager.

    Args:
        parent: folder of a file system in memory, in which a folder for the copies is made.
        store: host and port of the job's store.
        bind: address of this node to serve copies at, if not `address`.
    """

    def __init__(
        self,
        parent: Path,
        store: tuple[str, int],
        job: str,
        address: str,
        secret: bytes,
        bind: str | None = None,
    ) -> None:
        super().__init__("hexi-keeper", store, _LOOK_S)
        _sweep(parent)
        self.folder, self._lock = _locked_folder(parent)
        self.url = f"{address}:{serve_files(self.folder, secret, address, bind)}"
        self._job, self._secret = job, secret
        self._round: tuple[str, int] | None = None
        self._done: tuple[str, int] | None = None
        self._doubled = ""
        self._failures: Counter[tuple[str, str]] = Counter()

    def __exit__(self, *raised: object) -> None:
        self._round = None
        super().__exit__(*raised)
        shutil.rmtree(self.folder, ignore_errors=True)

    def begin_round(self, name: str, number: int) -> None:
        """Begin a round, in which this node has a number, and whose ranks are about to start."""
        self._round = name, number

    def _attend(self, store: dist.Store) -> None:
        """Take care of the newest copy; say once in a round why that fails again and again."""
        if self._round is None:
            return
        name, number = self._round
        try:
            self._take_care(store, name, number)
        except OSError as problem:
            self._failures[name, str(problem)] += 1
            # Where the job ends, or goes on without a node, a few fail that nobody needs.
            if self._failures[name, str(problem)] == _FAILURES:
                say(f"the newest copy is not on two nodes yet: {problem}; tries again")

    def _take_care(self, store: dist.Store, name: str, number: int) -> None:
        """Record the newest copy of this node's ranks, and download that of the node before it."""
        job = dist.PrefixStore(self._job, store)
        board = CopyBoard(job, name)
        last = board.last()
        if last is None:
            self._double(job, dist.PrefixStore(name, store), name)
            return
        if self._done == (name, last[0]):
            return
        iteration, nodes = last
        folder = copy_folder(self.folder, name, iteration)
        folder.mkdir(parents=True, exist_ok=True)  # a node without a part in the plan has written nothing
        own_files = list_files(folder)
        board.tell_own(iteration, number, self.url, own_files)
        while (owns := board.owns(iteration, nodes)) is None:
            if self._round != (name, number):
                return
            time.sleep(_LOOK_S)
        before, files = owns[(number - 1) % nodes]
        # A copy has one description, which one of the nodes has written: all nodes download it.
        needed = {file: (before, *files[file]) for file in files}
        for url, node_files in owns:
            needed |= {file: (url, *node_files[file]) for file in node_files if not file.endswith(".distcp")}
        for file, (url, size, digest) in needed.items():
            if file not in own_files:
                pull([url], copy_path(name, iteration), file, (size, digest), folder, self._secret)
        board.tell_held(iteration, self.url, own_files.keys() | needed.keys())
        board.tell_safe(iteration, number, nodes)
        while board.safe() != iteration:
            if self._round != (name, number):
                return
            time.sleep(_LOOK_S)
        drop_older(self.folder, folder)
        self._done = name, iteration

    def _double(self, job: dist.Store, round_: dist.Store, name: str) -> None:
        """Download what the node before this one alone holds of the copy that the round has loaded.

        So that copy, too, survives the next failure of a node, which may come before the round has another.
        """
        if self._doubled == name or not round_.check([TRAINING]):
            return
        decision = json.loads(round_.get(DECISION))
        copy, urls = decision["copy"], decision["urls"]
        before = urls[urls.index(self.url) - 1]
        if copy and before != self.url:
            path, files = copy_path(copy["name"], copy["iteration"]), copy["files"]
            alone = {file for file, (_, _, held) in files.items() if held == [before]}
            for file in alone:
                size, digest, held = files[file]
                pull(held, path, file, (size, digest), self.folder.joinpath(*path), self._secret)
            own = {file for file, (_, _, held) in files.items() if self.url in held}
            CopyBoard(job, copy["name"]).tell_held(copy["iteration"], self.url, alone | own)
        self._doubled = name


def _locked_folder(parent: Path) -> tuple[Path, TextIO]:
    """Make a folder for copies; return it with its lock, which is held.

    It gets the name that `_sweep` looks for once it is locked, so that no agent that starts meanwhile takes
    it for one that was left.
    """
    made = Path(tempfile.mkdtemp(prefix=".hexi-", dir=parent))
    lock = (made / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(parent / f"{_PREFIX}{made.name.removeprefix('.hexi-')}"), lock


def _sweep(parent: Path) -> None:
    """Remove the folders that killed agents have left, recognised by the lock that no process holds."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
