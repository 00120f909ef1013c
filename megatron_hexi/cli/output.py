"""What commands print, write and draw, and what they refuse to before any work is done."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from megatron_hexi.errors import HexiError

if TYPE_CHECKING:  # takes most of a second to import, which a command without a picture need not spend
    from matplotlib.figure import Figure

#: Told what is done, how many steps of it, and how many there are.
Progress = Callable[[str, int, int], None]

#: Endings that any matplotlib draws.
PICTURE_FORMATS = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "tif", "tiff", "eps")

# Wide enough for a line a rank when the output goes to a file or a pipe.
_PIPE_WIDTH = 160


def say(message: str) -> None:
    """A line on standard error: what was done besides the document asked for."""
    print(message, file=sys.stderr)


def print_report(report: RenderableType) -> None:
    """A report on standard output, as wide as the terminal."""
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(report)


def print_json(document: dict[str, Any]) -> None:
    """The one document that ``--json`` asks for."""
    print(json.dumps(document, indent=2, allow_nan=False))


def check_outputs(inputs: Sequence[Path], outputs: Sequence[Path | None], picture: Path | None) -> None:
    """Refuse what could not be written, before any work is done.

    Args:
        inputs: files that the command reads.
        outputs: files that it will write, the picture aside; ``None`` where not asked for.
        picture: likewise.

    Raises:
        HexiError: a folder that is missing or closed, one file for two purposes, an unknown kind of picture.
    """
    taken = [path.resolve() for path in inputs]
    for path in (*outputs, picture):
        if path is None:
            continue
        if path.is_dir():
            raise HexiError(f"{path}: is a folder; give the name of a file in it")
        if not path.parent.is_dir():
            raise HexiError(f"{path}: the folder {path.parent} is not there; make it first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise HexiError(f"{path}: the folder {path.parent} cannot be written to; choose another")
        if path.resolve() in taken:
            raise HexiError(
                f"{path}: would be overwritten, it is read or written already; choose another name"
            )
        taken.append(path.resolve())
    if picture is not None and picture.suffix.lstrip(".").lower() not in PICTURE_FORMATS:
        raise HexiError(
            f"{picture}: a picture in an unknown format; end its name in .{', .'.join(PICTURE_FORMATS)}"
        )


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure whole or not at all, and say so.

    Raises:
        HexiError: the format is unknown, or the file cannot be written.
    """
    from megatron_hexi.report.pictures import save_picture

    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            whole = Path(folder) / path.name
            save_picture(figure, whole)
            os.replace(whole, path)
    except OSError as problem:
        raise HexiError(f"{path}: cannot be written ({problem.strerror}); check the folder") from None
    say(f"drew {path}")


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A bar on standard error while something is under way; ``None`` where nobody watches."""
    if not sys.stderr.isatty():
        yield None
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

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield tell
