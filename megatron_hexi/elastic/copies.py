"""Copies of the training state in the memory of nodes: files that outlive the ranks that wrote them.

A copy is a checkpoint in Megatron's torch_dist format of which each node has the files of its own ranks, in a
file system in memory, and those of one other node. The agent of a node (`launcher.keeper`) serves its files
and downloads its neighbour's; the files that each node holds are recorded in the job's store (`CopyBoard`).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_hexi.elastic.copy_files import Files

#: Variables of a rank's environment: iterations from copy to copy, this node's folder of copies, and its URL.
COPY_INTERVAL_VARIABLE, COPIES_VARIABLE = "HEXI_COPY_INTERVAL", "HEXI_COPIES"
COPIES_URL_VARIABLE = "HEXI_COPIES_URL"
#: Key of the job: why no copies are made any more.
COPIES_OFF = "copies/off"
#: Seconds that the next round waits for agents to record the files of the newest copy that they hold.
_SAID_S = 2.0


@dataclass(frozen=True)
class FoundCopy:
    """A copy of the state, all of whose files are on nodes that are present.

    Args:
        files: size in bytes, SHA-256 and URLs of the nodes that hold it, of each file, by name.
    """

    name: str
    iteration: int
    files: Mapping[str, tuple[int, str, Sequence[str]]]


class CopyBoard:
    """Keys in the job's store about the copies of one round."""

    def __init__(self, job: dist.Store, name: str) -> None:
        self._job, self._name = job, name
        self._store = dist.PrefixStore(f"copies/{name}", job)

    def announce(self, iteration: int, nodes: int) -> None:
        """Record that all ranks of `nodes` nodes have written a copy."""
        self._store.set("last", json.dumps([iteration, nodes]))
        self._job.set("copies/round", self._name)

    def last(self) -> tuple[int, int] | None:
        """Return the newest copy's iteration, and the number of nodes that have written it."""
        if not self._store.check(["last"]):
            return None
        iteration, nodes = json.loads(self._store.get("last"))
        return iteration, nodes

    def tell_own(self, iteration: int, number: int, url: str, files: Files) -> None:
        """Record the files that node `number` of the round has written, and the URL that serves them."""
        self._store.set(f"{iteration}/own/{number}", json.dumps([url, files]))
        self.tell_held(iteration, url, files)

    def owns(self, iteration: int, nodes: int) -> list[tuple[str, Files]] | None:
        """Return each node's URL and the files that it has written; ``None`` until all are recorded."""
        keys = [f"{iteration}/own/{number}" for number in range(nodes)]
        if not self._store.check(keys):
            return None
        entries = [json.loads(text) for text in self._store.multi_get(keys)]
        every = {name: file for _, files in entries for name, file in files.items()}
        self._store.set(f"{iteration}/all", json.dumps(every))
        return [
            (url, {name: (size, digest) for name, (size, digest) in files.items()}) for url, files in entries
        ]

    def tell_held(self, iteration: int, url: str, names: Iterable[str]) -> None:
        """Record the names of the files that the node at a URL holds."""
        self._store.set(f"{iteration}/held/{url}", json.dumps(list(names)))

    def tell_safe(self, iteration: int, number: int, nodes: int) -> None:
        """Record that node `number` holds its neighbour's part; the copy is safe when all `nodes` do."""
        self._store.set(f"{iteration}/safe/{number}", "")
        if self._store.check([f"{iteration}/safe/{node}" for node in range(nodes)]):
            self._store.set("safe", str(iteration))

    def safe(self) -> int | None:
        """Return the iteration of the newest copy of which every file is on two nodes."""
        return int(self._store.get("safe")) if self._store.check(["safe"]) else None

    def tell_lost(self, iteration: int) -> None:
        """Record that a copy could not be loaded, so that it is not found again."""
        self._store.set(f"{iteration}/lost", "")

    def find(self, iteration: int, urls: Iterable[str]) -> FoundCopy | None:
        """Return the copy of an iteration if the nodes at these URLs hold all of it."""
        if not self._store.check([f"{iteration}/all"]) or self._store.check([f"{iteration}/lost"]):
            return None
        files = json.loads(self._store.get(f"{iteration}/all"))
        holders: dict[str, list[str]] = {name: [] for name in files}
        for url in urls:
            if self._store.check([f"{iteration}/held/{url}"]):
                for name in json.loads(self._store.get(f"{iteration}/held/{url}")):
                    holders.get(name, []).append(url)
        if not all(holders.values()):
            return None
        return FoundCopy(self._name, iteration, {n: (*files[n], holders[n]) for n in files})


def find_newest(job: dist.Store, urls: Sequence[str]) -> FoundCopy | None:
    """Return the newest copy that the present nodes hold together; ``None``: they hold none."""
    if not job.check(["copies/round"]):
        return None
    board = CopyBoard(job, job.get("copies/round").decode())
    last = board.last()
    assert last is not None, "its round is named after it"
    deadline = time.monotonic() + _SAID_S
    while (copy := board.find(last[0], urls)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    safe = board.safe()
    return copy or (None if safe is None else board.find(safe, urls))


def drop_older(copies: Path, newest: Path) -> None:
    """Remove all copies that are older than `newest`, and those of other rounds."""
    for folder in newest.parent.glob("iter_*"):
        if folder.name < newest.name:
            shutil.rmtree(folder, ignore_errors=True)
    for round_folder in copies.iterdir():
        if round_folder.is_dir() and round_folder != newest.parent:
            shutil.rmtree(round_folder, ignore_errors=True)


def copies_folder() -> Path | None:
    """Return this node's folder of copies; ``None`` where no copies are made."""
    folder = os.environ.get(COPIES_VARIABLE)
    return None if folder is None else Path(folder)
