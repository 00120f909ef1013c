"""Gives the lab namespaces of its own, and ends the lab with the process that started it.

The lab is process 1 of its PID namespace: when it ends, the kernel ends every process in there, and with the
last of them its mounts and network namespaces go. It is told to end by the death of the process that started
it, however that died.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from megatron_hexi.errors import PlatformError
from megatron_hexi.external_tool import output_of
from megatron_hexi.lab.testbed.lab import Isolation, Lab

#: The program of each package that is needed.
_TOOLS = {"setpriv": "util-linux", "unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
#: Nine times the weight of other processes.
_NICE = -10
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def check_tools() -> None:
    """Refuse a machine that lacks a program that the testbed needs."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise PlatformError(f"the testbed needs {tool}, which is not here; install {package} (Linux)")


def find_isolation() -> Isolation:
    """Return the strongest isolation that this user may have on this machine, found by trying."""
    kinds: tuple[Isolation, ...] = ("root", "user namespace") if os.geteuid() == 0 else ("user namespace",)
    for kind in kinds:
        tried = subprocess.run([*command_prefix(kind), "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            return kind
    return "none"


def command_prefix(isolation: Isolation) -> list[str]:
    """Return the words before a command that give it namespaces of its own and end it with its parent."""
    if isolation == "none":
        return [*_DIE_WITH_PARENT]
    user = ("--user", "--map-root-user") if isolation == "user namespace" else ()
    return [*_DIE_WITH_PARENT, "unshare", *user, *_NAMESPACES]


def go_first(lab: Lab) -> None:
    """Raise the scheduling priority of this process and its children, in a lab of root's."""
    if lab.isolation == "root":
        raise_priority()


def raise_priority(process: int | None = None) -> None:
    """Raise the scheduling priority of a process and its later children; without effect unless run by root.

    Linux may share the cores among sessions first, each with a weight of its own; torchrun gives every rank
    a session.

    Args:
        process: id of the process; ``None``: this one.
    """
    with suppress(OSError):  # not root, root in a user namespace only, or no grouping by session
        os.setpriority(os.PRIO_PROCESS, process or 0, _NICE)
        Path(f"/proc/{process or 'self'}/autogroup").write_text(str(_NICE))


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


def run(*words: str) -> None:
    """Run ``ip``, ``tc`` or ``mount``."""
    try:
        output_of(words)
    except PlatformError as problem:
        raise PlatformError(
            f"{problem}; the kernel must offer veth, bridge, sch_htb and cls_u32, or do without links: "
            "--emulate-links off"
        ) from None
