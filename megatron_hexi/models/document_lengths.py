"""The lengths of documents as users give them: a file, or a log-normal distribution."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

import numpy as np

from megatron_hexi.errors import HexiError
from megatron_hexi.models.documents import Documents
from megatron_hexi.text_file import read_text
from megatron_hexi.whole_number import whole_number

_FLAG = "--document-lengths"
_FORMS = "give FILE or lognormal:MEDIAN,SIGMA or lognormal:MEDIAN,SIGMA,MAX, such as lognormal:1500,1.2,32768"
#: The longest document, as plans count tokens, and the most documents of one length.
_MOST = 2**40
#: Lengths that stand for a log-normal distribution, each for those within a factor of about 1.02; of all
#: documents, a part of 1e-9 is shorter or longer than any of them.
_POINTS, _DEVIATIONS = 600, 6.0
#: The widest distribution: of two thirds of the documents the longest is e^8 = 3,000 times the median.
_WIDEST = 8.0


def read_documents(text: str) -> Documents:
    """Return the documents that the value of --document-lengths describes.

    Args:
        text: ``lognormal:MEDIAN,SIGMA`` or ``lognormal:MEDIAN,SIGMA,MAX`` with tokens of the median and the
            longest document, and the standard deviation of the logarithm; or a file: a JSON list of lengths,
            or lines of a length, or of a length and the number of documents of this length.

    Raises:
        HexiError: the value or the file is malformed; with the line, what is there, and what to write.
    """
    kind, colon, parameters = text.partition(":")
    if colon and kind == "lognormal":
        return _lognormal(text, parameters.split(","))
    content = read_text(text, remedy=_FORMS)
    entries = _of_json(text, content) if content.lstrip()[:1] in ("[", "{") else _of_lines(text, content)
    counts = Counter[int]()
    for length, count in entries:
        counts[length] += count
    if not counts:
        raise HexiError(f"{_FLAG} {text}: holds no lengths; write the tokens of one document on each line")
    lengths = sorted(counts)
    return Documents(tuple(lengths), tuple(float(counts[length]) for length in lengths))


def _of_lines(path: str, content: str) -> Iterable[tuple[int, int]]:
    """Yield length and count of each line; blank lines and text after # count nothing."""
    for number, line in enumerate(content.split("\n"), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        numbers = [_count(word) for word in words]
        if len(words) > 2 or None in numbers:
            _refuse(
                path, f"line {number}", line, "write tokens, or tokens and a number of documents: 1500 20"
            )
        length, count = (*(number for number in numbers if number is not None), 1)[:2]
        yield length, count


def _of_json(path: str, content: str) -> Iterable[tuple[int, int]]:
    """Yield each length of a JSON list with the count 1."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as problem:
        line = getattr(problem, "lineno", 1)
        _refuse(path, f"line {line}", content.split("\n")[line - 1], "write a JSON list: [812, 1500, 64]")
    if not isinstance(found, list):
        _refuse(path, "line 1", content, "write a JSON list of lengths: [812, 1500, 64]")
    for number, length in enumerate(found, 1):
        if type(length) is not int or not 0 < length <= _MOST:
            _refuse(path, f"entry {number}", repr(length), "write the tokens of a document, such as 1500")
        yield length, 1


def _count(text: str) -> int | None:
    """Return a number from 1 to the most; ``None`` for any other text."""
    number = whole_number(text)
    return number if number is not None and 0 < number <= _MOST else None


def _refuse(path: str, place: str, found: str, remedy: str) -> NoReturn:
    raise HexiError(f"{_FLAG} {path}: {place}: {found.strip()[:40]!r} is no length; {remedy}")


def _lognormal(text: str, parameters: list[str]) -> Documents:
    """Return a log-normal distribution as a histogram; documents above the longest are cut to it."""
    median, most = _count(parameters[0]), _count(parameters[2]) if len(parameters) > 2 else _MOST
    sigma = parameters[1] if len(parameters) > 1 else ""
    if len(parameters) not in (2, 3) or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", sigma):
        raise HexiError(f"{_FLAG} {text}: is not MEDIAN,SIGMA in tokens; {_FORMS}")
    if median is None or most is None or not 0 < float(sigma) <= _WIDEST or median > most:
        raise HexiError(
            f"{_FLAG} {text}: give MEDIAN and MAX from 1 to {_MOST}, MAX no less than MEDIAN, and SIGMA "
            f"above 0 and up to {_WIDEST:g}, such as lognormal:1500,1.2,32768"
        )
    spread = float(sigma)
    ends = np.linspace(-_DEVIATIONS, _DEVIATIONS, _POINTS + 1)
    below, weight = (np.array([_normal(end - by) for end in ends]) for by in (0.0, spread))
    # The mean of each interval, so that tokens are those of the distribution.
    means = median * math.exp(spread**2 / 2) * np.diff(weight) / np.diff(below)
    lengths = np.clip(np.rint(means), 1, most).astype(np.int64)
    distinct, number = np.unique(lengths, return_inverse=True)
    counts = np.bincount(number, np.diff(below))
    return Documents(tuple(distinct.tolist()), tuple(counts.tolist()))


def _normal(value: float) -> float:
    """Return the part of a standard normal distribution below a value."""
    return math.erfc(-value / math.sqrt(2)) / 2
