"""Network namespaces of the lab, and functions that run work in one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_hexi.errors import PlatformError
from megatron_hexi.external_tool import output_of

#: Where `ip netns` keeps them. The lab puts an empty file system of its own over /run.
_FOLDER = Path("/run/netns")


def prepare() -> None:
    """Mount a folder for names that only the lab sees. Needs the lab's own mount namespace."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    _FOLDER.mkdir()


def enter(name: str) -> None:
    """Move the calling thread, and the processes that it starts, into a namespace."""
    handle = os.open(_FOLDER / name, os.O_RDONLY)
    try:
        os.setns(handle, os.CLONE_NEWNET)
    finally:
        os.close(handle)


def within[T](name: str, work: Callable[[], T]) -> T:
    """Call a function in a namespace: sockets, processes and ``/proc/sys/net`` belong to it."""
    with ThreadPoolExecutor(1, initializer=enter, initargs=(name,)) as thread:
        return thread.submit(work).result()


def run(*words: str | Sequence[str]) -> None:
    """Run ``ip``, ``tc`` or ``mount``.

    Raises:
        PlatformError: it failed; with what it said.
    """
    command = [part for word in words for part in ([word] if isinstance(word, str) else word)]
    try:
        output_of(command)
    except PlatformError as problem:
        raise PlatformError(
            f"{problem}; the kernel must offer veth, bridge, sch_htb and cls_u32, or do without links: "
            "--emulate-links off"
        ) from None
