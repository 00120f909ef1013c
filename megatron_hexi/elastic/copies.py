"""Copies of the training state in the memory of nodes: files that outlive the ranks that wrote them.

A copy is a checkpoint in Megatron's torch_dist format of which each node has the files of its own ranks, in a
file system in memory, and those of one other node. The agent of a node (`launcher.keeper`) serves its files
and fetches its neighbour's; what each holds stands in the job's store (`CopyBoard`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import threading
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch.distributed as dist

#: Of a rank's environment: iterations from copy to copy, this node's folder of them, and where it is served.
COPY_INTERVAL_VARIABLE, COPIES_VARIABLE, COPIES_URL_VARIABLE = (
    "HEXI_COPY_INTERVAL",
    "HEXI_COPIES",
    "HEXI_COPIES_URL",
)
_BLOCK, _PART = 1 << 20, ".part"
_PULL_S = 60.0
#: How long the next round waits until agents have said what they hold of the newest copy.
_SAID_S = 2.0

#: Bytes and SHA-256 of each file, by name.
Files = dict[str, tuple[int, str]]


def bare_name(name: str) -> str:
    """Return a name from the job's store if it is safe as a file name in a folder of copies.

    Raises:
        OSError: it could lead elsewhere, or to what is hidden: no name of a round, or of a file of a copy.
    """
    # Of torch's checkpoints, the one file whose name begins with a dot.
    if name != ".metadata" and not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise OSError(f"{name!r} is no bare name of a file; somebody else writes to the job's store")
    return name


def copy_folder(copies: Path, name: str, iteration: int) -> Path:
    """Return the folder of a copy, named as Megatron names a checkpoint.

    Args:
        copies: the node's folder of copies.
        name: name of the round that made it.
        iteration: number of the last iteration in it.

    Raises:
        OSError: the name is none of a round.
    """
    return copies / bare_name(name) / f"iter_{int(iteration):07d}"


def list_files(folder: Path) -> Files:
    """Return size and SHA-256 of each regular file in a folder; links are skipped."""
    files: Files = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix != _PART and _is_plain(path)):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        files[path.name] = path.stat().st_size, digest.hexdigest()
    return files


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def pull(urls: Iterable[str], name: str, expected: tuple[int, str], folder: Path) -> None:
    """Download a file from the first node that has it unchanged; it appears whole or not at all.

    Args:
        urls: URLs of folders that may have it.
        name: name of the file.
        expected: its size, bytes, and SHA-256.
        folder: folder for the file.

    Raises:
        OSError: its name is no bare one, no node has it, or there is no room.
    """
    part = folder / f".{bare_name(name)}{_PART}"
    reason = "no node has it"
    for url in urls:
        if not url.startswith("http://"):
            reason = f"{url!r} is no node's address"
            continue
        digest = hashlib.sha256()
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{url}/{name}", timeout=_PULL_S) as source, part.open("wb") as target:
                while block := source.read(_BLOCK):
                    digest.update(block)
                    target.write(block)
        except (OSError, HTTPException) as problem:
            reason = f"{url}: {problem}"
            continue
        if (part.stat().st_size, digest.hexdigest()) == tuple(expected):
            part.replace(folder / name)
            return
        reason = f"{url} has other bytes"
    part.unlink(missing_ok=True)
    raise OSError(f"{name}: {reason}")


class _Handler(SimpleHTTPRequestHandler):
    """Serves files by name only: the name of a round is random, and folders are not listed."""

    def send_head(self) -> Any:
        """Serve a regular file of the folder itself; links are not followed."""
        folder, path = Path(os.path.realpath(self.directory)), Path(self.translate_path(self.path))
        inside = folder / path.relative_to(self.directory)
        if os.path.realpath(inside) == str(inside) and inside.is_file():
            return super().send_head()
        self.send_error(404)
        return None

    def list_directory(self, path: Any) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def serve_files(folder: Path) -> int:
    """Serve a folder by HTTP until the process ends; return the port."""
    server = ThreadingHTTPServer(("", 0), partial(_Handler, directory=str(folder)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="hexi-copies", daemon=True).start()
    return int(server.server_address[1])


@dataclass(frozen=True)
class FoundCopy:
    """A copy of the state, complete on the nodes that are present together.

    Args:
        name: name of the round that made it.
        iteration: number of the last iteration in it.
        files: size, SHA-256 and URLs of nodes of each file, by name.
    """

    name: str
    iteration: int
    files: Mapping[str, tuple[int, str, Sequence[str]]]


class CopyBoard:
    """Keys in the job's store about the copies of one round.

    Args:
        job: the store of the whole job.
        name: name of the round.
    """

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
        """Record the files that a node has written, and where it serves them."""
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
        """Record the files that a node holds."""
        self._store.set(f"{iteration}/held/{url}", json.dumps(list(names)))

    def tell_safe(self, iteration: int, number: int, nodes: int) -> None:
        """Record that a node holds its neighbour's part; the copy is safe when all `nodes` do."""
        self._store.set(f"{iteration}/safe/{number}", "")
        if self._store.check([f"{iteration}/safe/{node}" for node in range(nodes)]):
            self._store.set("safe", str(iteration))

    def safe(self) -> int | None:
        """Return the iteration of the newest copy of which every file is on two nodes."""
        return int(self._store.get("safe")) if self._store.check(["safe"]) else None

    def find(self, iteration: int, urls: Iterable[str]) -> FoundCopy | None:
        """Return the copy of an iteration if the nodes at these URLs hold all of it."""
        if not self._store.check([f"{iteration}/all"]):
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
    """Return the newest copy that the nodes that are present hold together.

    Args:
        job: the store of the whole job.
        urls: URLs at which the present nodes serve their files.
    """
    if not job.check(["copies/round"]):
        return None
    board = CopyBoard(job, job.get("copies/round").decode())
    last = board.last()
    assert last is not None, "its round is named after it"
    deadline = time.monotonic() + _SAID_S
    copy = board.find(last[0], urls)
    while copy is None and time.monotonic() < deadline:
        time.sleep(0.1)
        copy = board.find(last[0], urls)
    safe = board.safe()
    return copy or (None if safe is None else board.find(safe, urls))


def complete_copy(copy: FoundCopy, copies: Path, url: str, job: dist.Store) -> None:
    """Download the files of a copy that this node lacks.

    Args:
        copy: the copy.
        copies: this node's folder of copies.
        url: URL at which this node serves its copies.
        job: the store of the whole job.

    Raises:
        OSError: a file cannot be had, or there is no room.
    """
    folder = copy_folder(copies, copy.name, copy.iteration)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (size, digest, urls) in copy.files.items():
        if url not in urls:
            places = [f"{source}/{copy.name}/{folder.name}" for source in urls]
            pull(places, name, (size, digest), folder)
    CopyBoard(job, copy.name).tell_held(copy.iteration, url, copy.files)


def drop_older(copies: Path, newest: Path) -> None:
    """Remove this round's earlier copies and all of other rounds; ranks may be writing the next one."""
    for folder in newest.parent.glob("iter_*"):
        if folder.name < newest.name:
            shutil.rmtree(folder, ignore_errors=True)
    for round_folder in copies.iterdir():
        if round_folder.is_dir() and round_folder != newest.parent:
            shutil.rmtree(round_folder, ignore_errors=True)


def copies_folder() -> Path | None:
    """Return this node's folder of copies; ``None`` where no copies are made."""
    with suppress(KeyError):
        return Path(os.environ[COPIES_VARIABLE])
    return None
