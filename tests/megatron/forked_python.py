"""A Python whose processes are forked from one that has imported Megatron already.

`write_python` writes a program that is called as an interpreter is: ``-m MODULE``, ``-c CODE`` or a script,
and their arguments. It passes them on to the process that forks, with its folder, environment and standard
streams, and ends as the forked process does; if it is killed, so is the forked process. What that starts as
`sys.executable` is forked as well: the ranks of torchrun are.

What a test is about must not be what this leaves out: the order of imports, the choice of the platform at the
import of our package, the namespaces and limits of the process that starts it, and its process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

_LENGTH, _NUMBER = struct.Struct("!Q"), struct.Struct("!q")
_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def write_python(path: Path, address: Path) -> None:
    """Write the program.

    Args:
        path: of the program.
        address: the socket on which the process that forks listens.
    """
    client = shlex.join([sys.executable, "-IS", str(Path(__file__).resolve()), str(address), str(path)])
    path.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    path.chmod(0o755)


def ask(address: str, python: str, words: list[str]) -> int:
    """Be the program: have a process forked, and return its exit code, negative after a signal."""
    request = {
        "python": python,
        "words": words,
        "folder": os.getcwd(),
        "variables": dict(os.environ),
        "parent": os.getppid(),
    }
    text = json.dumps(request).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until there is a process to pass them on to
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [_LENGTH.pack(len(text))], [0, 1, 2])
        server.sendall(text)
        process = _NUMBER.unpack(_receive(server, _NUMBER.size))[0]
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(process, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        code: int = _NUMBER.unpack(_receive(server, _NUMBER.size))[0]
        return code


def answer(listener: socket.socket, overseers: list[int]) -> list[str] | None:
    """Fork the process that a client asks for, and another that oversees it.

    Args:
        listener: a connection waits there.
        overseers: processes forked by earlier calls; those that have ended are removed.

    Returns:
        In the process asked for, the words of its command line; otherwise `None`.
    """
    connection, _ = listener.accept()
    overseers[:] = [one for one in overseers if os.waitpid(one, os.WNOHANG) == (0, 0)]
    overseer = os.fork()
    if overseer:
        connection.close()
        overseers.append(overseer)
        return None
    length, streams, *_ = socket.recv_fds(connection, _LENGTH.size, 3)
    request = json.loads(_receive(connection, _LENGTH.unpack(length)[0]))
    process = os.fork()
    if not process:
        listener.close()
        connection.close()
        words: list[str] = request.pop("words")
        _become(streams, **request)
        return words
    for stream in streams:  # whoever reads them waits until all have closed them
        os.close(stream)
    _oversee(process, connection)
    os._exit(0)


def execute(words: list[str]) -> NoReturn:
    """Do what an interpreter does with the words of its command line, and end."""
    import atexit
    import threading
    import traceback

    code: Any = 0
    try:
        _run(words)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # Taking down all that is imported would copy its pages, and take longer than most commands.
    os._exit(code or 0)


def _run(words: list[str]) -> None:
    import runpy

    while words[0] == "-u":
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        del words[0]
    option, *rest = words
    if option == "-m":
        name, *arguments = rest
        sys.path[0] = os.getcwd()
        sys.argv[:] = [name, *arguments]
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif option == "-c":
        code, *arguments = rest
        sys.path[0] = ""
        sys.argv[:] = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        assert not option.startswith("-"), f"python {option} is not carried out here"
        sys.path[0] = str(Path(option).resolve().parent)
        sys.argv[:] = words
        runpy.run_path(option, run_name="__main__")


def _become(streams: list[int], python: str, folder: str, variables: dict[str, str], parent: int) -> None:
    os.setsid()  # what is sent to its group must not reach the one that forks
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.executable = python
    os.getppid = lambda: parent  # by which the ranks of one launcher know each other


def _oversee(process: int, client: socket.socket) -> None:
    """Tell the client when the process has ended, and end the process where the client has."""
    client.sendall(_NUMBER.pack(process))
    either: list[Any] = [os.pidfd_open(process), client]
    ready, _, _ = select.select(either, [], [])
    if client in ready:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if client not in ready:
        client.sendall(_NUMBER.pack(code))


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("the process that forks is gone")
        received += part
    return received


def _main(address: str, python: str, *words: str) -> NoReturn:
    code = ask(address, python, list(words))
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _main(*sys.argv[1:])
