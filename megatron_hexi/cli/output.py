"""Output of commands: text, JSON and pictures, and the checks of output paths before any work is done."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megatron_hexi.errors import HexiError, printable
from megatron_hexi.text_file import check_output
from megatron_hexi.whole_number import whole_number

if TYPE_CHECKING:  # takes most of a second to import, which a command without a picture need not spend
    from matplotlib.figure import Figure

#: Told what is done, how many steps of it, and how many there are.
Progress = Callable[[str, int, int], None]

#: Endings that any matplotlib draws.
PICTURE_FORMATS = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "tif", "tiff", "eps")

#: Endings by what a file is that ends in them; a file that is written as another kind is refused.
_ENDINGS = {
    "YAML": ("yaml", "yml"),
    "HTML": ("html", "htm"),
    "JSON": ("json",),
    "text": ("txt", "args"),
    "CSV": ("csv",),
    "a picture": PICTURE_FORMATS,
    "another format": ("docx", "gz", "jsonl", "md", "toml", "tsv", "xlsx", "xml", "zip"),
}

#: Seconds between two lines of progress in a file or a pipe.
_LINE_S = 10.0
# Wide enough for a line a rank when the output goes to a file or a pipe.
_PIPE_WIDTH = 160


def say(message: str) -> None:
    """Print a line on standard error, beside the document asked for."""
    print(printable(message), file=sys.stderr)


def tell(message: str) -> None:
    """Print a line on standard output."""
    print(printable(message))


def print_report(report: RenderableType) -> None:
    """Print a report on standard output, as wide as the terminal or as COLUMNS says."""
    width_known = sys.stdout.isatty() or (whole_number(os.environ.get("COLUMNS", "")) or 0) > 0
    Console(width=None if width_known else _PIPE_WIDTH).print(_Printable(report))


class _Printable:
    """A report without the control characters of names in it; colours are the console's own."""

    def __init__(self, report: RenderableType) -> None:
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._report, options):
            if not control:
                text = "\n".join(map(printable, text.split("\n")))
            yield Segment(text, style, control)


def print_json(document: dict[str, Any]) -> None:
    """Print the one document that ``--json`` asks for."""
    print(json.dumps(document, indent=2, allow_nan=False))


def check_outputs(
    inputs: Iterable[Path | None],
    outputs: Iterable[Path | None],
    picture: Path | None,
    kind: str = "YAML",
) -> None:
    """Refuse output paths that cannot be written, before any work is done.

    Args:
        inputs: files that the command reads; ``None`` where there is none.
        outputs: files that it will write, the picture aside, first the one that the user names; ``None``
            where not asked for.

    Raises:
        ModuleNotFoundError: a picture, and nothing to draw it with.
    """
    # What standard output is redirected to would be replaced, and what is printed would be lost.
    streams = map(Path, ("/dev/stdout", "/dev/stderr"))
    used_paths = {os.path.realpath(path) for path in (*inputs, *streams) if path is not None}
    outputs = list(outputs)
    for path in (*outputs, picture):
        if path is None:
            continue
        check_output(path)
        if os.path.realpath(path) in used_paths:
            raise HexiError(f"{path}: this command reads or writes the file already; choose another name")
        used_paths.add(os.path.realpath(path))
    if outputs and outputs[0] is not None:
        check_ending(outputs[0], kind)
    if picture is not None and picture.suffix.lstrip(".").lower() not in PICTURE_FORMATS:
        raise HexiError(
            f"{picture}: a picture in an unknown format; end its name in .{', .'.join(PICTURE_FORMATS)}"
        )
    if picture is not None and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(name="matplotlib")  # told as every missing extra is


def check_ending(path: Path, kind: str) -> None:
    """Refuse a name whose ending belongs to files of another kind; one without a known ending is fine."""
    ending = path.suffix.lstrip(".").lower()
    kind_of_ending = next((name for name, endings in _ENDINGS.items() if ending in endings), kind)
    if kind_of_ending != kind:
        raise HexiError(
            f"{path}: the file is to be {kind}, but its name ends as that of {kind_of_ending}; end the name "
            f"in .{_ENDINGS[kind][0]}"
        )


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure atomically, and print its path."""
    from megatron_hexi.report.pictures import save_picture

    save_picture(figure, path)
    say(f"drew {path}")


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar on standard error; a line every ten seconds where standard error is no terminal."""
    if not sys.stderr.isatty():
        with _progress_lines() as progress:
            yield progress
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.total:,}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=1)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield progress


@contextlib.contextmanager
def _progress_lines() -> Iterator[Progress]:
    """Say once in `_LINE_S` seconds how far work is, also while a long step reports nothing."""
    begun, latest, ended = time.monotonic(), "", threading.Event()

    def progress(what: str, done: int, total: int) -> None:
        nonlocal latest
        latest = f"{what}: {done:,} of {total:,}"

    def speak() -> None:
        while not ended.wait(_LINE_S):
            if latest:
                say(f"{latest} after {time.monotonic() - begun:.0f} s")

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield progress
    finally:
        ended.set()
        speaker.join()


def output_path(text: str | Path) -> Path:
    """Parse the name of a file to write.

    Raises:
        BadParameter: it ends as a folder does, or programs would take it for an option, or for a stream.
    """
    name = str(text)
    if name.endswith("/"):
        raise typer.BadParameter(f"{name!r} is a folder; give the name of a file in it")
    if name.startswith("-"):
        raise typer.BadParameter(f"{name!r} begins as an option does; write './{name}'")
    return Path(name)


def output_option(metavar: str, text: str) -> Any:
    """Return the option for the file that a command writes."""
    return typer.Option("--out", "-o", metavar=metavar, help=text, show_default=False, parser=output_path)


PlanOut = Annotated[Path, output_option("PLAN.yaml", "Where to write the plan.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Picture = Annotated[
    Path | None,
    typer.Option(metavar="OUT.png", help="Draw a picture too (.png, .svg, .pdf, …).", parser=output_path),
]
