"""``python -m megatron_hexi.kubernetes.start FOLDER KIND``: runs the commands of a pod.

The folder is the job's ConfigMap: ``pods.json`` has the commands of each kind and index, ``job.args``
Megatron's arguments, which are added to commands that train. The pod's index is Kubernetes'
``JOB_COMPLETION_INDEX``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from pydantic import TypeAdapter, ValidationError

from megatron_hexi.argument_file import read_words
from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.text_file import read_text
from megatron_hexi.whole_number import whole_number

_LOOK_S = 0.2


@dataclass(frozen=True)
class Command:
    """A process that a pod starts.

    Args:
        trains: whether Megatron's arguments follow the words.
    """

    words: tuple[str, ...]
    trains: bool = False
    variables: dict[str, str] = field(default_factory=dict)


_TABLE = TypeAdapter(dict[str, tuple[tuple[Command, ...], ...]])


def find_commands(folder: Path, kind: str, index: str) -> list[tuple[list[str], dict[str, str]]]:
    """Return the words after ``python`` and the environment variables of each process of a pod."""
    path = folder / "pods.json"
    text, number = read_text(path), whole_number(index)
    try:
        pods = _TABLE.validate_json(text).get(kind, ())
    except ValidationError:
        pods = ()
    if number is None or not 0 <= number < len(pods):
        raise HexiError(
            f"{path}: has no commands for pod {index[:40]!r} of kind {kind[:80]!r}; apply all that hexi "
            "launch --kubernetes wrote"
        )
    return [
        ([*one.words, *(read_words(folder / "job.args") if one.trains else ())], one.variables)
        for one in pods[number]
    ]


def run_commands(commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> int:
    """Run processes at the same time until all have ended; the first that fails ends the others.

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
