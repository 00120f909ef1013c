"""The parts of the benchmark: each is bounded in seconds, and what it measures is written line by line."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hexi.text_file import write_text_atomically

#: One measurement, as JSON has it.
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """The device, the folder and the size of a run.

    Args:
        gpu: the catalogue's name of the GPU.
        folder: for logs and files, made new.
        is_dry: whether the parts run with tiny sizes on the CPU.
        cells: numbers of the trainings to run, from 0; empty: all.
    """

    gpu: str
    folder: Path
    is_dry: bool = False
    cells: tuple[int, ...] = ()

    @property
    def platform(self) -> tuple[str, ...]:
        """Megatron's arguments for it."""
        return ("--hexi-platform", "cpu" if self.is_dry else "cuda")


@dataclass(frozen=True)
class Deadline:
    """The end of a part's time.

    Args:
        at: in seconds of `time.monotonic`.
    """

    at: float

    @property
    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self.at - time.monotonic())


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        name: on the command line and in the file.
        title: for people.
        seconds: that it may take.
        run: yields a row for everything that it measures.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[Setting, Deadline], Iterator[Row]]


def run_parts(parts: Sequence[Part], setting: Setting, output: Path | None) -> Row:
    """Run parts one after another; one that fails does not keep the others from running.

    Args:
        parts: in order.
        setting: where.
        output: written after each row.

    Returns:
        What was measured, as it is written.
    """
    run: Row = {"gpu": setting.gpu, "dry": setting.is_dry, **versions(), "parts": {}}
    for part in parts:
        print(f"{part.name}: {part.title}, at most {part.seconds:.0f} s", file=sys.stderr, flush=True)
        begin = time.monotonic()
        kept: Row = {"rows": [], "failed": ""}
        run["parts"][part.name] = kept
        try:
            for row in part.run(setting, Deadline(begin + part.seconds)):
                kept["rows"].append(row)
                _say(part.name, row)
                _write(run, output)
        except Exception as problem:  # a part is measured by whatever way it may fail
            kept["failed"] = f"{type(problem).__name__}: {problem}"[-4000:]
            print(f"{part.name}: failed: {kept['failed']}", file=sys.stderr, flush=True)
        kept["seconds"] = round(time.monotonic() - begin, 1)
        _write(run, output)
    return run


def json_rows(module: str, words: Sequence[str], deadline: Deadline) -> Iterator[Row]:
    """Run a module that prints a JSON object a line, and yield these as they come.

    Raises:
        RuntimeError: it failed; what it printed so far has been yielded.
    """
    command = [sys.executable, "-m", module, *words, "--seconds", f"{deadline.left_s:.0f}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            yield json.loads(line)
        said = process.stderr.read()
    if process.returncode:
        raise RuntimeError(said[-3000:])


def print_rows(
    description: str | None, kinds: Sequence[Callable[[Any, bool], Iterator[Row]]], seconds: float
) -> int:
    """Print the rows of some kinds of work, a JSON object a line, until the time is over: a module's main.

    Args:
        description: the module's documentation.
        kinds: each is called with a device and whether sizes are tiny.
        seconds: that it takes at most, unless the command line says otherwise.

    Returns:
        The exit code, 0.
    """
    import torch

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=seconds, help="at most (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="one small shape of each kind")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    for kind in kinds:
        for row in kind(torch.device(options.device), options.tiny):
            print(json.dumps(row), flush=True)
            if time.monotonic() > end:
                return 0
    return 0


def versions() -> Row:
    """The device, the versions of libraries and the date of a run."""
    import torch  # takes seconds, which predicting need not spend

    found: Row = {"device": "cpu", "cudnn": torch.backends.cudnn.version()}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    for name in ("torch", "megatron-core", "transformer-engine", "flash-attn-3", "nvidia-nccl-cu13"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"date": datetime.date.today().isoformat()}


def _write(run: Row, output: Path | None) -> None:
    if output is not None:
        write_text_atomically(output, json.dumps([run], indent=1) + "\n")


def _say(name: str, row: Row) -> None:
    text = ", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, dict | list))
    print(f"{name}: {text}"[:300], file=sys.stderr, flush=True)
