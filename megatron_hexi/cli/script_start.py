"""``hexi capture``, and launch scripts that run with stand-ins for the programs that start trainings."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatron_hexi.argument_file import read_arguments_file
from megatron_hexi.cli.output import check_outputs, output_option, say
from megatron_hexi.errors import HexiError, raise_all
from megatron_hexi.models import arguments_of_start
from megatron_hexi.report.launch_lines import flags_text
from megatron_hexi.shell import training_start
from megatron_hexi.text_file import read_text, write_text_atomically

#: Put in place of each program; no word of the script's becomes part of it.
_SHIM = '#!/bin/sh\nexec "$HEXI_START_PYTHON" -I "$HEXI_START_FILE" "$0" "$@"\n'
#: Seconds that a script has to clean up once its training would have started.
_CLEAN_UP_S = 5.0


def arguments_of_script(command: Sequence[str]) -> list[str]:
    """Run a command up to its first start of a training, and return Megatron's arguments of this."""
    _refuse_several(command)
    read, write = os.pipe()
    others = (*training_start.SPREADERS, *training_start.SILENT)
    with _stand_ins(others) as environment, open(read, encoding="utf-8") as pipe:
        environment["HEXI_START_PIPE"] = str(write)
        try:
            process = _run(command, environment, write)
        finally:
            os.close(write)
        try:
            line = pipe.readline()  # ends with the last process that has the pipe
        finally:
            _end(process)
    if not line:
        raise HexiError(
            f"{shlex.join(command)}: ended with exit code {process.returncode}, and started no training by "
            "torchrun, python, srun, mpirun, ray job submit or megatron sft; give the command that does"
        )
    started = json.loads(line)
    script, words = started["script"], started["arguments"]
    if not words:
        raise HexiError(
            f"{shlex.join(command)}: {started['program']} starts {script or 'no script'} without arguments; "
            "give the command that trains"
        )
    say(f"note: not started: {started['program']} {script}")
    given = arguments_of_start(script, words, Path(command[-1]))
    raise_all(given.faults)
    for note in given.notes:
        say(f"note: {note}")
    return [word.text for word in given.words]


def start_with_plan(command: Sequence[str], plan: Path, drop: Sequence[str], first: Sequence[str]) -> int:
    """Run a command whose trainings start under a plan, and return its exit code.

    Args:
        drop: flags that the plan sets.
        first: words before the script's own arguments, which go before them.
    """
    words = {
        "drop": [*drop, "--hexi-plan"],
        "first": list(first),
        "add": ["--hexi-plan", str(plan.resolve())],
    }
    with _stand_ins(training_start.SPREADERS) as environment:
        environment["HEXI_START_WORDS"] = json.dumps(words)
        try:
            return subprocess.run(command, env=environment, check=False).returncode
        except OSError as problem:
            raise _not_run(command, problem) from None


def _refuse_several(command: Sequence[str]) -> None:
    """Refuse a script whose text shows that it starts different trainings."""
    for word in command:
        if word.endswith((".sh", ".sbatch", ".slurm")) and os.path.isfile(word):
            try:
                read_arguments_file(read_text(word), Path(word))
            except HexiError as problem:
                if "different trainings" in str(problem):
                    raise


@contextlib.contextmanager
def _stand_ins(others: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the environment of a script that finds stand-ins first on its path."""
    with tempfile.TemporaryDirectory(prefix="hexi-start-") as folder:
        for name in (*training_start.PROGRAMS, *others):
            Path(folder, name).write_text(_SHIM)
            Path(folder, name).chmod(0o700)
        yield os.environ | {
            "PATH": os.pathsep.join((folder, os.environ.get("PATH", os.defpath))),
            "HEXI_START_FOLDER": folder,
            "HEXI_START_PYTHON": sys.executable,
            "HEXI_START_FILE": training_start.__file__,
        }


def _run(command: Sequence[str], environment: dict[str, str], pipe: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,  # to standard error, as all that is said beside a document
            pass_fds=(pipe,),
            start_new_session=True,
        )
    except OSError as problem:
        raise _not_run(command, problem) from None


def _not_run(command: Sequence[str], problem: OSError) -> HexiError:
    return HexiError(f"{command[0]}: cannot be run ({problem.strerror}); check the command")


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


app = typer.Typer()


@app.command(epilog="Example: hexi capture -o job.args -- bash train.sh")
def capture(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND …", help="The command that starts your training.")
    ],
    out: Annotated[Path, output_option("JOB.args", "Where to write the arguments.")],
) -> None:
    """Write the Megatron arguments that a launch script uses.

    They are what --model takes. Runs the command with stand-ins for torchrun, python, srun, mpirun, ray and
    megatron first on PATH, and ends it at its first training run, which does not take place. What
    comes before is done, but for pkill, killall and ssh. A program that it calls by an absolute path is not
    stood in for, and starts.
    """
    check_outputs([Path(word) for word in command if os.path.isfile(word)], [out], None, "text")
    write_text_atomically(out, flags_text(arguments_of_script(command)))
    say(f"wrote {out}")
