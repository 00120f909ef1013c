"""``hexi patch CHECKOUT`` and ``hexi unpatch CHECKOUT``: our line in the scripts of a Megatron-LM checkout.

The change is a unified diff without context (``diff -U0``) that only adds lines, so it holds our text and
none of NVIDIA's. Lines ``# NAME sha256 HEX`` at its top say which original each file must be; a file that
is not that original is left alone.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import megatron_hexi
from megatron_hexi.cli.output import say
from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import check_output, read_bytes, write_atomically

_SHA256 = re.compile(r"# (?P<name>\S+) sha256 (?P<digest>[0-9a-f]{64})")
_FILE = re.compile(r"\+\+\+ b/(?P<name>\S+)")
_HUNK = re.compile(r"@@ -(?P<after>\d+),0 \+\d+(?:,(?P<count>\d+))? @@")


@dataclass(frozen=True)
class FileChange:
    """Lines added to one file.

    Attributes:
        insertions: number of a line of the original (from 1), and the line added after it.
    """

    name: str
    sha256: str
    insertions: tuple[tuple[int, bytes], ...]

    def apply(self, original: bytes) -> bytes:
        """Return the original with our lines inserted."""
        lines = original.splitlines(keepends=True)
        for after, line in reversed(self.insertions):
            lines.insert(after, line)
        return b"".join(lines)

    def revert(self, patched: bytes) -> bytes:
        """Return the file without our lines; `is_original` tells whether nothing else was changed."""
        lines = patched.splitlines(keepends=True)
        for after, line in self.insertions:
            if lines[after : after + 1] == [line]:
                del lines[after]
        return b"".join(lines)

    def is_original(self, content: bytes) -> bool:
        """Return whether a file's content is the original's."""
        return hashlib.sha256(content).hexdigest() == self.sha256

    def is_patched(self, content: bytes) -> bool:
        """Return whether a file's content is the original's with our lines inserted."""
        return not self.is_original(content) and self.is_original(self.revert(content))


def known_diffs() -> list[Path]:
    """Return the diffs that come with megatron-hexi, one for each supported Megatron-LM version."""
    package = Path(megatron_hexi.__file__).parent
    # Installed, they lie inside the package; in the repository, beside it.
    folders = (package / "patches", package.parent / "patches")
    return sorted(diff for folder in folders for diff in folder.glob("megatron-lm-*.diff"))


def read_diff(path: Path) -> list[FileChange]:
    """Return the changes in one of our diffs."""
    digests: dict[str, str] = {}
    insertions: dict[str, list[tuple[int, bytes]]] = {}
    name, after, expected = "", 0, 0
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if match := _SHA256.fullmatch(line):
            digests[match["name"]] = match["digest"]
        elif match := _FILE.fullmatch(line):
            name = match["name"]
        elif match := _HUNK.fullmatch(line):
            after, expected = int(match["after"]), int(match["count"] or 1)
        elif expected and line.startswith("+"):
            insertions.setdefault(name, []).append((after, line[1:].encode() + b"\n"))
            expected -= 1
        elif not line.startswith(("#", "--- a/")):
            raise HexiError(
                f"{path}:{number}: {line!r} does more than add a line; write the diff with diff -U0"
            )
    missing = insertions.keys() - digests.keys()
    if missing or not insertions:
        raise HexiError(
            f"{path}: no line '# NAME sha256 HEX' for {', '.join(sorted(missing)) or 'any file'}; add it"
        )
    return [FileChange(name, digests[name], tuple(lines)) for name, lines in insertions.items()]


def patch_checkout(checkout: Path, diffs: Sequence[Path] | None = None) -> list[Path]:
    """Add our line to all training scripts of a Megatron-LM checkout or to none; return the changed files."""
    changes, contents = _matching(checkout, diffs)
    for change in changes:
        if change.is_patched(contents[change.name]):
            raise HexiError(
                f"{checkout / change.name}: patched already; take it off with hexi unpatch {checkout}"
            )
    return _write(checkout, {change.name: change.apply(contents[change.name]) for change in changes})


def unpatch_checkout(checkout: Path, diffs: Sequence[Path] | None = None) -> list[Path]:
    """Remove our line again, so that every file is its original, byte for byte.

    Args and returns as for `patch_checkout`.
    """
    changes, contents = _matching(checkout, diffs)
    for change in changes:
        if not change.is_patched(contents[change.name]):
            raise HexiError(
                f"{checkout / change.name}: not patched; put our line in with hexi patch {checkout}"
            )
    return _write(checkout, {change.name: change.revert(contents[change.name]) for change in changes})


def checkout_is_patched(checkout: Path, diffs: Sequence[Path] | None = None) -> bool:
    """Return whether our line is in the training scripts of a Megatron-LM checkout.

    Args as for `patch_checkout`.
    """
    changes, contents = _matching(checkout, diffs)
    return any(change.is_patched(contents[change.name]) for change in changes)


def _matching(checkout: Path, diffs: Sequence[Path] | None) -> tuple[list[FileChange], dict[str, bytes]]:
    """Find the diff that fits this checkout, patched or not; return it with the files' contents."""
    candidates = known_diffs() if diffs is None else list(diffs)
    refusals: list[str] = []
    for diff in candidates:
        changes = read_diff(diff)
        contents: dict[str, bytes] = {}
        for change in changes:
            file = checkout / change.name
            if not os.path.exists(file):
                refusals.append(f"{file}: not there; give the folder of a Megatron-LM checkout")
                break
            content = read_bytes(file)
            if not (change.is_original(content) or change.is_patched(content)):
                refusals.append(
                    f"{file}: not the original of {diff.stem}; restore it with git checkout -- "
                    f"{change.name}, or add 'import megatron_hexi.adaptor' as its first import yourself"
                )
                break
            contents[change.name] = content
        else:
            _refuse_half_patched(checkout, changes, contents)
            return changes, contents
    raise HexiError(
        refusals[-1] if refusals else "no diff comes with this installation; reinstall megatron-hexi"
    )


def _refuse_half_patched(checkout: Path, changes: list[FileChange], contents: dict[str, bytes]) -> None:
    patched = [change.name for change in changes if change.is_patched(contents[change.name])]
    if patched and len(patched) < len(changes):
        raise HexiError(
            f"{checkout}: only {', '.join(patched)} is patched; "
            f"restore it with git checkout -- {' '.join(patched)}"
        )


def _write(checkout: Path, contents: dict[str, bytes]) -> list[Path]:
    """Write all files or none: each is replaced atomically, and a failure restores those before it."""
    targets = {checkout / name: content for name, content in contents.items()}
    originals = {path: read_bytes(path) for path in targets}
    for path in targets:
        check_output(path)
    done: list[Path] = []
    try:
        for path, content in targets.items():
            write_atomically(path, content)
            done.append(path)
    except HexiError as problem:
        for path in done:
            write_atomically(path, originals[path])
        raise HexiError(f"{problem}; nothing was changed") from None
    return done


app = typer.Typer()

Checkout = Annotated[
    Path, typer.Argument(metavar="CHECKOUT", help="Folder of a Megatron-LM checkout, with pretrain_gpt.py.")
]


@app.command(epilog="Example: hexi patch ~/Megatron-LM")
def patch(checkout: Checkout) -> None:
    """Add the import line to a Megatron-LM checkout."""
    for path in patch_checkout(checkout):
        say(f"patched {path}")


@app.command(epilog="Example: hexi unpatch ~/Megatron-LM")
def unpatch(checkout: Checkout) -> None:
    """Remove the import line from a Megatron-LM checkout.

    Restores every file byte for byte.
    """
    for path in unpatch_checkout(checkout):
        say(f"restored {path}")
