"""Every option and argument of every command, with every kind of bad value: taken, or refused in one line."""

from __future__ import annotations

import functools
import io
import os
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from megatron_hexi import planner
from megatron_hexi.cli.main import app
from megatron_hexi.lab.testbed import command as testbed
from tests.support.covering import covering
from tests.support.planned import baseline, make_planned
from tests.support.refusals import SINFO, write_good_files
from tests.support.shell import call_hexi, is_one_error_line

pytestmark = pytest.mark.timeout(60)

JOB = ("--model", "gpt-3b", "--seq-length", "4096", "--recompute-granularity", "full")
HERE = ("--cluster", "cluster.yaml", "--model", "gpt-7b")
PODS = ("--image", "x/y:1")
EMULATED = ("testbed.yaml", "--emulate-links", "off", "-o", "run")

#: A good command line of each command, of `hexi launch` also with manifests.
LINES: dict[str, tuple[str, ...]] = {
    "plan": ("cluster.yaml", *JOB, "-o", "out.yaml"),
    "compare": ("cluster.yaml", *JOB),
    "simulate": ("plan.yaml", *HERE),
    "launch": ("plan.yaml", *HERE, "--", "--lr", "1e-4"),
    "launch --kubernetes=job": ("plan.yaml", *HERE, *PODS, "--elastic", "1", "--", "--save", "/x"),
    "launch-probe": ("cluster.yaml", *PODS, "--volume", "t:/t", "--", "-o", "/t/c.yaml"),
    "show": ("plan.yaml",),
    "validate": ("plan.yaml", *HERE),
    "proportion": (
        *("--speeds", "1,1", "--seq-length", "64", "--num-attention-heads", "8", "--kv-channels", "16"),
        *("-o", "out.yaml"),
    ),
    "catalog": ("H100-SXM-80GB",),
    "patch": ("folder",),
    "unpatch": ("folder",),
    "doctor": ("--local",),
    "probe": ("-o", "out.yaml"),
    "place": ("plan.yaml", "--cluster", "cluster.yaml", "-o", "hosts"),
    "slurm-arguments": ("job.args", "--plan", "plan.yaml", "--checkpoints", "saved", "-o", "words"),
    "capture": ("-o", "out.args", "--", "bash", "train.sh"),
    "recipe list": (),
    "recipe show": ("llama3-8b-128k",),
    "recipe write": ("llama3-8b-128k", "-o", "out.args"),
    "report": ("run.yaml", "--record", "record.jsonl", "-o", "out.html"),
    "testbed run": (*EMULATED, "--", "-m", "module"),
    "testbed check": EMULATED,
}

#: Values that no number, name or file is; those of `NAMES` are names of files that a command may write.
NAMES = (
    "nan",
    "inf",
    "0",
    "1.5",
    "1_0",
    "+1",
    " 1 ",
    "\u0663",
    "\x1b[31m",
    "a\nb",
    "\udcff",
    ",",
    "latin.yaml",
)
BAD = (
    *NAMES,
    *("", "-1", "-x", "-", "x/", "1e999", "9" * 18, "9" * 5000, "-" + "9" * 5000, "0x10"),
    *("absent/x", "folder", "cluster.yaml/x", "fifo", "deep.json", "empty.yaml", "/", "..", ":", "a:b=c"),
)

NOT_FOLDERS = ("", "cluster.yaml/x", "fifo", "latin.yaml", "deep.json", "empty.yaml")

#: What is taken although it looks odd: by option (or command and argument), the values.
TAKEN = {
    "--out": {*NAMES, "1e999", "0x10", ":", "a:b=c", "empty.yaml", "9" * 18},
    # Text and HTML are not written to a name that ends as YAML does.
    **{
        f"{line}: --out": {*NAMES, "1e999", "0x10", ":", "a:b=c", "9" * 18} - {"latin.yaml"}
        for line in ("launch", "place", "slurm-slurm-arguments", "capture", "recipe write", "report")
    },
    "--trace": {*NAMES, "1e999", "0x10", ":", "a:b=c", "deep.json", "9" * 18} - {"latin.yaml"},
    "--tried": {*NAMES, "1e999", "0x10", ":", "a:b=c", "9" * 18} - {"latin.yaml"},
    "--image": {"nan", "inf", "0", "1.5", "1_0", "1e999", "0x10", "9" * 18, "folder", "fifo", "absent/x"}
    | {"latin.yaml", "deep.json", "empty.yaml", "cluster.yaml/x"},
    "--name": {"nan", "inf", "folder", "fifo"},
    "--namespace": {"nan", "inf", "0", "1e999", "0x10", "9" * 18, "folder", "fifo"},
    "--restarts": {"0"},
    "--memory-margin": {"0", "1.5", "+1", " 1 ", "1_0"},
    "--timeout": {"1.5", "+1", " 1 ", "1_0"},
    "--budget": {"1.5", "+1", " 1 ", "1_0"},
    "proportion: --speeds": {"1.5", "+1", " 1 ", "1_0", "9" * 18},
    "--gpus": {"0"},
    "--megatron": {"folder", "/", ".."},  # a finding of the doctor's
    **{f"launch: {option}": set[str]() for option in ("--image", "--name", "--namespace", "--restarts")},
    "probe: --kernel": set(BAD) - {""},  # the ranks look for it
    "capture: command": set(BAD),  # any program's words
    "testbed run: program": {"latin.yaml", "deep.json", "empty.yaml"},
    # Folders that need not be there yet.
    **{
        f"testbed {verb}: --out": set(BAD) - {*NOT_FOLDERS, "/", "..", "\udcff", "9" * 5000, "-" + "9" * 5000}
        for verb in ("run", "check")
    },
    "--checkpoints": set(BAD) - set(NOT_FOLDERS),
}


class Taken(Exception):
    """A command begins to work."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with good files and bad ones, and commands that end where they would begin to work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h100,a100")
    write_good_files()
    Path("job.args").write_text("--bf16")
    example = Path(__file__).parents[3] / "scripts" / "testbed" / "two-fast-two-slow.yaml"
    Path("testbed.yaml").write_text(example.read_text())
    Path("folder").mkdir()
    os.mkfifo("fifo")
    Path("latin.yaml").write_bytes("name: Käse".encode("latin-1"))
    Path("deep.json").write_text('{"a":' * 50_000)
    Path("empty.yaml").touch()

    def end(*_: Any, **__: Any) -> None:
        raise Taken

    def find_plan(request, cluster, *, with_baselines, simpler_within, progress, tried):
        found = [baseline("ring", 1000.0)] if with_baselines else []
        return make_planned(request.job, cluster, [[[3] * 4, [1] * 4]], baselines=found, notes=["made up"])

    monkeypatch.setattr(planner, "find_plan", find_plan)
    for place in ("megatron_hexi.probe.run.probe", "megatron_hexi.doctor.examine"):
        monkeypatch.setattr(place, end)
    monkeypatch.setattr(testbed, "_supervised", end)
    monkeypatch.setattr("megatron_hexi.cli.script_start._run", end)
    monkeypatch.setattr(testbed, "check_tools", lambda: None)
    monkeypatch.setattr(testbed, "find_isolation", lambda: "none")
    return tmp_path


@functools.cache
def parameters() -> dict[str, tuple[str, Any]]:
    """Each command's options with values, and arguments, by a name: the line's command and the parameter."""
    found = {}
    for line in LINES:
        command: Any = get_command(app)
        for word in line.split(" --")[0].split():
            command = command.commands[word]
        for parameter in command.params:
            if parameter.param_type_name == "argument" or not (parameter.is_flag or parameter.count):
                found[f"{line}: {parameter.opts[0]}"] = line, parameter
    return found


def spell(line: str, parameter: Any, value: str) -> list[str]:
    """A command's good line with another value of one parameter."""
    words = [*line.split(), *LINES[line]]
    own, dashes, rest = words, [], []
    if "--" in words:
        place = words.index("--")
        own, dashes, rest = words[:place], words[place : place + 1], words[place + 1 :]
    if parameter.param_type_name == "argument":
        if parameter.nargs == -1:  # what follows the dashes
            return [*own, "--", value]
        first = len(line.split(" --")[0].split()) + line.count(" --")
        return [*own[:first], value, *own[first + 1 :], *dashes, *rest]
    kept = [
        word
        for before, word in zip(["", *own], own, strict=False)
        if word not in parameter.opts and before not in parameter.opts
    ]
    return [*kept, f"{parameter.opts[0]}={value}", *dashes, *rest]


def commands(command: Any, name: str = "") -> set[str]:
    """The names of all commands below one."""
    if not hasattr(command, "commands"):
        return {name}
    return {
        found
        for word, below in command.commands.items()
        for found in commands(below, f"{name} {word}".strip())
    }


def test_every_command_has_a_good_line(folder, monkeypatch, capsys):
    assert {line.split(" --")[0] for line in LINES} == commands(get_command(app))
    for number, (line, words) in enumerate(LINES.items()):
        if line in ("patch", "unpatch"):  # the folder is no checkout
            continue
        monkeypatch.setattr("sys.stdin", io.StringIO(SINFO))
        try:
            result = call_hexi(
                monkeypatch,
                capsys,
                [*line.split(), *(f"run{number}" if word == "run" else word for word in words)],
            )
        except Taken:
            continue
        assert result.code == 0, (line, result.err)


@pytest.mark.parametrize(("name", "value"), covering(list(parameters()), BAD))
def test_it_is_taken_or_refused_in_one_line(folder, monkeypatch, capsys, name, value):
    line, parameter = parameters()[name]
    monkeypatch.setattr("sys.stdin", io.StringIO(SINFO))
    try:
        result = call_hexi(monkeypatch, capsys, spell(line, parameter, value))
    except Taken:
        code = 0
    else:
        code = result.code
        said = "".join(
            text
            for text in result.err.splitlines(keepends=True)
            if not text.startswith(("note: ", "everything is"))
        )
        assert code == 0 or is_one_error_line(said), result.err
    assert code == (0 if value in TAKEN.get(name, TAKEN.get(parameter.opts[0], ())) else 2)
