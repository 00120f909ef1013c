"""Real text that every machine has: the sources of Python's standard library, as a Megatron data set.

One token a byte; a token of its own ends each file. The same Python gives the same data set.
"""

from __future__ import annotations

import logging
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy

#: A byte is its own token; this one stands after the last byte of a file.
END_OF_DOCUMENT = 256
VOCABULARY = 257

_ENOUGH_TOKENS = 4_000_000
#: Not the library itself: what was installed into it, and tests, which some distributions leave out.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """A data set on disk.

    Args:
        prefix: what Megatron's ``--data-path`` takes.
        files: source files in it.
        tokens: their bytes, and one more for each file.
    """

    prefix: Path
    files: int
    tokens: int


def build_corpus(prefix: Path) -> Corpus:
    """Write source files of the standard library, in the order of their names, until there are enough.

    Args:
        prefix: where the data set goes; its folder exists.
    """
    # Imports torch, and both tell at length what this machine lacks; training tells it in its log again.
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
    logging.disable(logging.NOTSET)

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=numpy.uint16)
    files = tokens = 0
    for source in _sources(Path(sysconfig.get_path("stdlib"))):
        text = numpy.frombuffer(source.read_bytes(), dtype=numpy.uint8)
        document = numpy.append(text, numpy.uint16(END_OF_DOCUMENT))
        builder.add_document(document, [document.size])
        files += 1
        tokens += document.size
        if tokens >= _ENOUGH_TOKENS:
            break
    builder.finalize(get_idx_path(str(prefix)))
    return Corpus(prefix, files, tokens)


def _sources(library: Path) -> Iterator[Path]:
    """The library's own source files, sorted by their path in it."""
    paths = (path.relative_to(library) for path in library.rglob("*.py"))
    for path in sorted(paths, key=Path.as_posix):
        if _LEFT_OUT.isdisjoint(path.parts) and (library / path).is_file():
            yield library / path
