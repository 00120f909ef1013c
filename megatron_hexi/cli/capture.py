"""``hexi capture``: Megatron's arguments from a launch script, which runs up to the start of the training."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_hexi.cli import training_start
from megatron_hexi.cli.output import check_outputs, output_option, say
from megatron_hexi.errors import HexiError
from megatron_hexi.other_files import refuse_other_loops
from megatron_hexi.report.launch_lines import flags_text
from megatron_hexi.text_file import read_text, write_text_atomically

app = typer.Typer()

#: Put in place of each program; no word of the script's becomes part of it.
_SHIM = '#!/bin/sh\nexec "$HEXI_CAPTURE_PYTHON" -I "$HEXI_CAPTURE_START" "$0" "$@"\n'
#: Seconds that a script has to clean up once its training would have started.
_CLEAN_UP_S = 5.0


@app.command(epilog="Example: hexi capture -o job.args -- bash train.sh")
def capture(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND …", help="The command that starts your training.")
    ],
    out: Annotated[Path, output_option("JOB.args", "Where to write the arguments.")],
) -> None:
    """Write the Megatron arguments that a launch script uses.

    They are what --model takes. Runs the command with stand-ins for torchrun, python, srun and mpirun first
    on PATH, and ends it at its first training run, which does not take place. What comes before is
    done. A program that it calls by an absolute path is not stood in for, and starts.
    """
    files = [Path(word) for word in command if os.path.isfile(word)]
    check_outputs(files, [out], None, "text")
    for path in files:
        if path.suffix in (".sh", ".sbatch", ".py"):
            refuse_other_loops(read_text(path), path)
    start = _run(command)
    words = start["arguments"]
    if not words:
        raise HexiError(
            f"{shlex.join(command)}: {start['program']} starts {start['script'] or 'no script'} without "
            "arguments; give the command that trains"
        )
    write_text_atomically(out, flags_text(words))
    say(f"note: not started: {start['program']} {start['script']}")
    say(f"wrote {out}")


def _run(command: Sequence[str]) -> dict[str, Any]:
    """Run a command up to its first training run, and return what `training_start` tells of it.

    Raises:
        HexiError: the command cannot be run, or starts no training.
    """
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="hexi-capture-") as folder, open(read, encoding="utf-8") as pipe:
        for name in training_start.NAMES:
            Path(folder, name).write_text(_SHIM)
            Path(folder, name).chmod(0o700)
        environment = os.environ | {
            "PATH": os.pathsep.join((folder, os.environ.get("PATH", os.defpath))),
            "HEXI_CAPTURE_FOLDER": folder,
            "HEXI_CAPTURE_PIPE": str(write),
            "HEXI_CAPTURE_PYTHON": sys.executable,
            "HEXI_CAPTURE_START": training_start.__file__,
        }
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=2,  # to standard error, as all that is said beside a document
                pass_fds=(write,),
                start_new_session=True,
            )
        except OSError as problem:
            raise HexiError(f"{command[0]}: cannot be run ({problem.strerror}); check the command") from None
        finally:
            os.close(write)
        try:
            line = pipe.readline()  # ends with the last process that has the pipe
        finally:
            _end(process)
    if not line:
        raise HexiError(
            f"{shlex.join(command)}: ended with exit code {process.returncode}, and started no training by "
            "torchrun, python, srun or mpirun; give the command that does"
        )
    told: dict[str, Any] = json.loads(line)
    return told


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started; one that has ended by itself keeps its exit code."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        try:
            process.wait(_CLEAN_UP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
