"""Commands in the documentation run: ``console`` blocks, page by page, and the examples of ``--help``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from megatron_hexi.cli.main import app
from scripts.docs.commands_page import commands

REPOSITORY = Path(__file__).parents[3]

_BLOCK = re.compile(r"^```console(?P<slow> slow)?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

#: Examples that need what is not here.
_NEED_MORE = {
    "hexi validate": "a cluster file of one's own",
    "hexi report": "the record of a run",
    "hexi patch": "a checkout of Megatron-LM",
    "hexi unpatch": "a checkout of Megatron-LM",
    "hexi doctor": "torchrun over several machines",
    "hexi probe": "torchrun over several machines",
    "hexi place": "a job of Slurm's",
    "hexi slurm-arguments": "a file of one's own",
    "hexi capture": "a launch script of one's own",
    "hexi testbed run": "minutes of an idle machine",
    "hexi testbed check": "minutes of an idle machine",
}


def commands_of(text: str, *, slow: bool) -> list[str]:
    """Commands of a page's blocks, in order; a block is slow, or it is not.

    A command begins behind ``$ `` and goes on where its line ends with a backslash; the rest is output.
    """
    found = []
    for block in _BLOCK.finditer(text):
        if bool(block["slow"]) == slow:
            joined = block["text"].replace("\\\n", "")
            found += [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]
    return found


PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8")
    for path in sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")])
}


#: Pages that plan as docs/quickstart.md and docs/performance.md do, from another file or for another batch.
REPEATING = {"README.md", "docs/choose-layout.md", "docs/planner.md"}
#: What each command wrote, with the files that it named: one that several pages show is run once.
_WRITTEN: dict[tuple[object, ...], dict[str, bytes]] = {}
#: What it printed.
_PRINTED: dict[tuple[object, ...], str] = {}
#: Lines of `hexi plan` that pages show whole.
_SHOWN = re.compile(r"^(?:predicted: [\d,]+ tokens/s|layout: ).*$", re.MULTILINE)


@pytest.fixture
def shell(forks, tmp_path):
    """Runs a command where a reader would: beside `examples`, with `hexi` and `torchrun` on the path."""
    folder, programs = tmp_path / "folder", tmp_path / "programs"
    for made in (folder, programs):
        made.mkdir()
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    hexi = programs / "hexi"
    hexi.write_text(f'#!/bin/sh\nexec {shlex.quote(str(forks.python))} -m megatron_hexi.cli.main "$@"\n')
    hexi.chmod(0o755)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "COLUMNS"}
    }
    environment["PATH"] = os.pathsep.join(
        [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    environment["PYTHONPATH"] = str(REPOSITORY)

    def run(command: str) -> str:
        words = shlex.split(command)
        key = (*words, *((folder / word).read_bytes() for word in words if (folder / word).is_file()))
        if key in _WRITTEN:
            for name, content in _WRITTEN[key].items():
                (folder / name).write_bytes(content)
            return _PRINTED[key]
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        if words[0] == "hexi":
            after = [path for path in folder.iterdir() if before.get(path) != path.stat().st_mtime_ns]
            _WRITTEN[key] = {path.name: path.read_bytes() for path in after}
            _PRINTED[key] = done.stdout
        return done.stdout

    return run


def is_long(command: str) -> bool:
    """Whether it takes longest: comparisons, and days of a scenario, which tests of the commands play too."""
    return command.startswith("hexi compare ") or "--scenario" in command


def parse(command: str) -> None:
    """Have a command's words read, and refused if they are wrong, without running it."""
    _, name, *words = shlex.split(command)
    hexi: Any = get_command(app)
    hexi.commands[name].make_context(name, words)


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if commands_of(text, slow=False)])
def test_commands_of_a_page_run(shell, page):
    """Commands that take long, and those of pages that repeat another, are parsed, and run on request.

    What a page shows of a plan is what they print.
    """
    printed: list[str] = []
    for command in commands_of(PAGES[page], slow=False):
        if is_long(command) or page in REPEATING:
            parse(command)
        else:
            printed += shell(command).splitlines()
    if page not in REPEATING:
        assert set(_SHOWN.findall(PAGES[page])) <= set(printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page, text in PAGES.items()
        if page in REPEATING or any(map(is_long, commands_of(text, slow=False)))
    ],
)
def test_all_commands_of_a_page_run(shell, page):
    for command in commands_of(PAGES[page], slow=False):
        shell(command)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if commands_of(text, slow=True)])
def test_slow_commands_of_a_page_run(shell, page):
    for command in commands_of(PAGES[page], slow=True):
        shell(command)


def test_the_pages_that_a_reader_follows_have_commands():
    """A block whose marks are misspelt would not be run, and nobody would notice."""
    for page in (
        "README.md",
        "docs/quickstart.md",
        "docs/choose-layout.md",
        "docs/your-cluster.md",
        "docs/performance.md",
    ):
        assert commands_of(PAGES[page], slow=False), page
    for page in ("docs/quickstart.md", "docs/tutorial.md"):
        assert commands_of(PAGES[page], slow=True), page
    for page, text in PAGES.items():
        begun = re.findall(r"^\s*```\s*console", text, re.MULTILINE)
        assert len(begun) == len(_BLOCK.findall(text)), page


def test_blocks_are_read_command_by_command():
    text = "```console\n$ a \\\n    b\nsaid\n$ c\n```\n\n```console slow\n$ d\n```\n\n```\n$ e\n```\n"
    assert commands_of(text, slow=False) == ["a     b", "c"]
    assert commands_of(text, slow=True) == ["d"]


EXAMPLES = {name: command.epilog.removeprefix("Example: ") for name, command in commands()}


def test_examples_of_help_run(shell):
    assert set(_NEED_MORE) < set(EXAMPLES)
    for name, example in EXAMPLES.items():  # in the order of `hexi --help`: a plan is made before it is read
        if name not in _NEED_MORE:
            (parse if is_long(example) else shell)(example)


@pytest.mark.slow
def test_long_examples_of_help_run(shell):
    for name in ("hexi plan", "hexi compare", "hexi simulate"):
        shell(EXAMPLES[name])
