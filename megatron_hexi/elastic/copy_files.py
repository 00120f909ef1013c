"""Files of copies between nodes: bare names in one folder, through which no link is followed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedRWPair, BufferedWriter
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

from megatron_hexi.elastic.channel import accept, connect
from megatron_hexi.elastic.entrance import Entrance, listen

_BLOCK, _PART = 1 << 20, ".part"
_PULL_S = 60.0
#: The first byte of an answer, and the most bytes of a question.
_HERE, _LINE_BYTES = b"+", 1024

#: Bytes and SHA-256 of each file, by name.
Files = dict[str, tuple[int, str]]


def bare_name(name: str) -> str:
    """Return a name from the job's store if it is safe as a file name in a folder of copies.

    Raises:
        OSError: it could lead to another folder or a hidden file, as names of rounds and copies never do.
    """
    # Of torch's checkpoints, the one file whose name begins with a dot.
    if name != ".metadata" and not re.fullmatch(r"\w[\w.-]{0,199}", name, re.ASCII):
        raise OSError(f"{name[:200]!r} is no bare name of a file; somebody else writes to the job's store")
    return name


def copy_path(name: str, iteration: int) -> tuple[str, str]:
    """Return the folders of a copy below a node's folder of copies: the round's, and the iteration's in it.

    Raises:
        OSError: `name` is not a name of a round.
    """
    return bare_name(name), f"iter_{int(iteration):07d}"


def copy_folder(copies: Path, name: str, iteration: int) -> Path:
    """Return the folder of a copy, named as Megatron names a checkpoint. Raises as `copy_path` does."""
    return copies.joinpath(*copy_path(name, iteration))


class _Folder:
    """A folder below another, reached by bare names without following a link; a context manager.

    Raises:
        OSError: an argument is no bare name, or no folder or regular file.
    """

    def __init__(self, root: Path, *names: str) -> None:
        self._descriptor = os.open(root, os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in names:
                inner = self._open(name, os.O_RDONLY | os.O_DIRECTORY)
                os.close(self._descriptor)
                self._descriptor = inner
        except OSError:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._descriptor)

    def names(self) -> list[str]:
        """Return the bare names of files and folders in it, sorted."""
        found = []
        for name in sorted(os.listdir(self._descriptor)):
            with suppress(OSError):
                found.append(bare_name(name))
        return found

    def read(self, name: str) -> BufferedReader:
        """Open a regular file to read."""
        file = os.fdopen(self._open(name, os.O_RDONLY | os.O_NONBLOCK), "rb")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(f"{name!r} is no regular file")
        return file

    def create(self, name: str) -> BufferedWriter:
        """Open a new file to write, in place of any other of that name."""
        self.remove(name)
        return os.fdopen(self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")

    @contextmanager
    def shared_lines(self, name: str) -> Iterator[set[str]]:
        """Yield the lines of a text file, locked, which are written back at the end of the context."""
        with os.fdopen(self._open(name, os.O_RDWR | os.O_CREAT), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            lines = set(file.read().splitlines())
            yield lines
            file.seek(0)
            file.writelines(f"{line}\n" for line in lines)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one of that name."""
        with suppress(FileNotFoundError):
            os.unlink(bare_name(name), dir_fd=self._descriptor)

    def rename(self, name: str, to: str) -> None:
        """Rename a file, in place of any other of the new name."""
        os.replace(bare_name(name), bare_name(to), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def _open(self, name: str, flags: int) -> int:
        safe = os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(bare_name(name), flags | safe, 0o600, dir_fd=self._descriptor)


def list_files(folder: Path) -> Files:
    """Return size and SHA-256 of each regular file in a folder; links are skipped."""
    files: Files = {}
    with _Folder(folder) as inside:
        for name in inside.names():
            if name.endswith(_PART):
                continue
            with suppress(OSError), inside.read(name) as file:
                files[name] = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    return files


def pull(
    urls: Iterable[str],
    path: tuple[str, str],
    name: str,
    expected: tuple[int, str],
    folder: Path,
    secret: bytes,
) -> None:
    """Download a file, whole or not at all, from the first node that has it unchanged.

    Args:
        urls: HOST:PORT of nodes that may have it.
        path: folders of the copy there, as `copy_path` returns them.
        expected: size in bytes and SHA-256 of the file.

    Raises:
        OSError: a name is no bare name, no node has the file, or there is no room.
    """
    source = "/".join(map(bare_name, (*path, name)))
    part = f"{hashlib.sha256(name.encode()).hexdigest()[:16]}{_PART}"
    reason: object = "no node has it"
    with _Folder(folder) as target:
        for url in urls:
            digest = hashlib.sha256()
            try:
                with _asked(url, secret) as stream, target.create(part) as file:
                    for block in _read_range(stream, source, 0, expected[0]):
                        digest.update(block)
                        file.write(block)
            except OSError as problem:
                reason = f"{url}: {problem}"
                continue
            if digest.hexdigest() == expected[1]:
                target.rename(part, name)
                return
            reason = f"{url} has other bytes"
        target.remove(part)
    raise OSError(f"{name}: {reason}")


def range_name(name: str, offset: int) -> str:
    """Return the name of the file that holds the range of a file which begins at an offset."""
    return f"{name}.at-{offset}"


def pull_ranges(
    urls: Iterable[str],
    path: tuple[str, str],
    name: str,
    boxes: Mapping[str, tuple[int, int, int]],
    folder: Path,
    secret: bytes,
) -> tuple[int, int]:
    """Download ranges of a file, each into a file of its own (`range_name`), unless they are there already.

    A range has no digest of its own: connections are authenticated, and a node that serves a file has written
    it or has checked all of it. Ranks of a node wait for each other: each range is sent to it once.

    Args:
        urls: HOST:PORT of nodes that may have the file.
        path: folders of the copy there, as `copy_path` returns them.
        boxes: what is needed, by a name that all ranks give it: offset and length of the range that has it,
            and the least bytes that would do.

    Returns:
        The bytes that came from other nodes, and the least that would have done.

    Raises:
        OSError: a name is no bare name, no node has a range, or there is no room.
    """
    source, moved = "/".join(map(bare_name, (*path, name))), 0
    with _Folder(folder) as target, target.shared_lines(f"{name}.boxes") as lines:
        new = {box: boxes[box] for box in boxes.keys() - lines}
        here = set(target.names())
        missing = {at: length for at, length, _ in new.values() if range_name(name, at) not in here}
        reason: object = "no node has it"
        for url in urls if missing else ():
            try:
                with _asked(url, secret) as stream:
                    for at, length in sorted(missing.items()):
                        with target.create(part := range_name(name, at) + _PART) as file:
                            file.writelines(_read_range(stream, source, at, length))
                            if file.tell() != length:
                                raise OSError("it has fewer bytes")
                        target.rename(part, range_name(name, at))
                        del missing[at]
                        moved += length
                break
            except OSError as problem:
                reason = f"{url}: {problem}"
        if missing:
            raise OSError(f"{name}: {reason}")
        lines.update(new)
    return moved, sum(least for _, _, least in new.values())


@contextmanager
def _asked(url: str, secret: bytes) -> Iterator[BufferedRWPair]:
    """Yield a connection to a node's server of copies."""
    host, _, port = url.rpartition(":")
    if not host or not port.isdecimal():
        raise OSError(f"{url!r} is no node's address")
    to = host.strip("[]"), int(port)
    with connect(to, secret, _PULL_S) as connection, connection.makefile("rwb") as stream:
        yield stream


def _read_range(stream: BufferedRWPair, source: str, offset: int, length: int) -> Iterator[bytes]:
    """Yield the bytes of a range of a file; fewer than its length where the connection ends."""
    stream.write(f"{source} {offset} {length}\n".encode())
    stream.flush()
    if stream.read(1) != _HERE:
        raise FileNotFoundError("it has no such file")
    while length and (block := stream.read(min(_BLOCK, length))):
        length -= len(block)
        yield block


class _Server(ThreadingTCPServer):
    """Serves ranges of regular files to holders of the job's secret.

    A line is ROUND/ITERATION/NAME OFFSET LENGTH, with three bare names. The answer is `_HERE` and the bytes;
    the connection ends where there are none, or fewer.
    """

    daemon_threads = True

    def __init__(self, listening: socket.socket, folder: Path, secret: bytes) -> None:
        super().__init__(listening.getsockname()[:2], BaseRequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket, self._folder, self._secret = listening, folder, secret
        self._entrance = Entrance("the server of copies")

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a client that proves the secret."""
        with self._entrance.one(str(client_address[0]), lambda: request.shutdown(socket.SHUT_RDWR)):
            connection = accept(request, self._secret)
        connection.settimeout(_PULL_S)
        with connection, connection.makefile("rwb") as stream, suppress(OSError, ValueError, OverflowError):
            while line := stream.readline(_LINE_BYTES).decode().removesuffix("\n"):
                path, offset, length = line.split(" ")
                (*names, name), left = path.split("/"), int(length)
                if len(names) != 2:
                    return
                with _Folder(self._folder, *names) as folder, folder.read(name) as file:
                    file.seek(int(offset))
                    stream.write(_HERE)
                    while left > 0 and (block := file.read(min(_BLOCK, left))):
                        left -= len(block)
                        stream.write(block)
                    stream.flush()
                if left:
                    return

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: `Entrance` has logged it."""


def serve_files(folder: Path, secret: bytes, name: str = "localhost", bind: str | None = None) -> int:
    """Serve a folder until the process ends; return the port.

    Raises:
        OSError: `bind` is none of this node's addresses.
    """
    server = _Server(listen(name, 0, bind), Path(os.path.realpath(folder)), secret)
    threading.Thread(target=server.serve_forever, name="hexi-copies", daemon=True).start()
    return int(server.server_address[1])
