"""``python -m megatron_hexi.kubernetes.start FOLDER KIND``: runs the commands of a pod.

The folder is the job's ConfigMap: ``pods.json`` has the commands of each kind and index, ``job.args``
Megatron's arguments, which are added to commands that train. The pod's index is Kubernetes'
``JOB_COMPLETION_INDEX``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron_hexi.argument_file import read_words
from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.text_file import read_text

_LOOK_S = 0.2


def find_commands(folder: Path, kind: str, index: str) -> list[tuple[list[str], dict[str, str]]]:
    """Return the words after ``python`` and the environment variables of each process of a pod.

    Args:
        folder: folder of the job's files.
        kind: name of the pod's kind.
        index: the pod's index, as the text that Kubernetes gives.

    Raises:
        HexiError: a file is missing or malformed, or has no commands for the pod.
    """
    path = folder / "pods.json"
    try:
        pods = json.loads(read_text(path))[kind]
        commands = [
            (list(one["words"]), bool(one["trains"]), dict(one["variables"])) for one in pods[int(index)]
        ]
    except (ValueError, TypeError, KeyError, IndexError) as problem:
        if isinstance(problem, HexiError):
            raise
        raise HexiError(
            f"{path}: has no commands for pod {index!r} of kind {kind!r}; apply all that hexi launch "
            "--kubernetes wrote"
        ) from None
    return [
        ([*words, *(read_words(folder / "job.args") if trains else ())], variables)
        for words, trains, variables in commands
    ]


def run_commands(commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> int:
    """Run processes at the same time until all have ended; the first that fails ends the others.

    Args:
        commands: the words after ``python`` and the environment variables of each process.

    Returns:
        The exit code: 0, or that of the first process to fail.
    """
    running = [
        subprocess.Popen([sys.executable, *words], env={**os.environ, **variables})
        for words, variables in commands
    ]

    def end(number: int, _frame: FrameType | None) -> None:
        for process in running:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    code = 0
    while True:
        codes = [process.poll() for process in running]
        failed = next((one for one in codes if one), 0)
        if failed and not code:
            code = failed if failed > 0 else 128 - failed
            end(signal.SIGTERM, None)
        if None not in codes:
            return code
        time.sleep(_LOOK_S)


def main() -> None:
    """Run this pod's commands.

    Raises:
        SystemExit: always, with the exit code of the first command to fail, 2 for wrong input, or else 0.
    """
    with user_errors():
        if len(sys.argv) != 3 or "JOB_COMPLETION_INDEX" not in os.environ:
            raise HexiError(
                "python -m megatron_hexi.kubernetes.start FOLDER KIND runs in a pod of an Indexed Job; let "
                "hexi launch --kubernetes write one"
            )
        folder, kind = sys.argv[1:]
        commands = find_commands(Path(folder), kind, os.environ["JOB_COMPLETION_INDEX"])
    sys.exit(run_commands(commands))


if __name__ == "__main__":
    main()
