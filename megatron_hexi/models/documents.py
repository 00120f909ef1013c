"""Documents by length, as training packs them into sequences.

Documents follow each other in an endless stream of random order, which is cut at every `seq_length` tokens as
with --dataloader-inter-document-masking: a document that crosses an end is two pieces. What a sequence
holds in the mean follows from the lengths alone: a document begins at any token with the same probability,
1 / mean length. (With --sft the rest of a document that crosses an end is left out, which changes little.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hexi.errors import HexiError

#: Classes that stand for all pieces of a sequence.
_CLASSES = 8
#: Lengths of pieces that count together differ by at most this factor.
_STEP = 2**0.125


class DocumentClass(NamedTuple):
    """Pieces of documents that count as equally long.

    Args:
        share: part of a sequence's tokens that is in such pieces, above 0 and up to 1.
        length: tokens of each of them, so that tokens and pairs of query and key are those of all the pieces.
    """

    share: float
    length: float


@dataclass(frozen=True)
class Documents:
    """Documents by length.

    Args:
        lengths: tokens of documents, ascending, each once.
        counts: number of documents of each length, in proportion.
        dealt: whether every batch's documents are dealt out to groups anew, whole where possible
            (--hexi-batch-shares); else each is cut over all groups.

    Raises:
        HexiError: there are no documents, or lengths or counts that are not above 0.
    """

    lengths: tuple[int, ...]
    counts: tuple[float, ...]
    dealt: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.counts):
            raise HexiError("document lengths: there are none; give at least one length above 0")
        if self.lengths[0] < 1 or min(self.counts) <= 0 or list(self.lengths) != sorted(set(self.lengths)):
            raise HexiError(
                "document lengths: write each once, in ascending order, with lengths and counts above 0"
            )

    @cached_property
    def _hash(self) -> int:
        return hash((self.lengths, self.counts, self.dealt))

    def __hash__(self) -> int:
        """Return a hash that is computed once: jobs are keys of caches, and lengths may be many."""
        return self._hash

    @property
    def mean(self) -> float:
        """Mean tokens of a document."""
        return float(np.dot(self.lengths, self.counts) / np.sum(self.counts))

    def longer_than(self, seq_length: int) -> float:
        """Return the part of the documents that is longer than a sequence."""
        return float(np.dot(np.array(self.lengths) > seq_length, self.counts) / np.sum(self.counts))

    def classes(self, seq_length: int) -> tuple[DocumentClass, ...]:
        """Return what a packed sequence holds in the mean, the shortest pieces first; shares add up to 1."""
        return _classes(self, seq_length)

    def pairs(self, seq_length: int) -> float:
        """Return the mean number of pairs of a query and a key that it sees in a packed sequence."""
        return sum(share * seq_length * (length + 1) / 2 for share, length in self.classes(seq_length))

    def drawn(self, seq_length: int, seed: int) -> Iterator[tuple[int, ...]]:
        """Yield packed sequences of a random stream without end, as the lengths of their pieces."""
        random = np.random.default_rng(seed)
        weights = np.array(self.counts) / np.sum(self.counts)
        stream: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        while True:
            while stream.sum() < seq_length:
                more = max(16, math.ceil(seq_length / self.mean))
                stream = np.append(stream, random.choice(self.lengths, more, p=weights))
            ends = np.cumsum(stream)
            last = int(np.searchsorted(ends, seq_length))
            left = int(ends[last]) - seq_length
            yield (*stream[:last].tolist(), int(stream[last]) - left)
            stream = np.append([left] if left else [], stream[last + 1 :]).astype(np.int64)


@lru_cache(maxsize=256)  # jobs that differ in other terms have the same
def _classes(documents: Documents, seq_length: int) -> tuple[DocumentClass, ...]:
    """Return what a packed sequence holds in the mean.

    Lengths are counted in the largest unit of which all lengths and the sequence are multiples: documents
    begin at multiples of it only. With S units a sequence, p(l) the part of the documents of l units and m
    their mean, a sequence holds of

        whole documents of l < S        p(l) (S - l + 1) / m
        pieces of r < S, cut at an end  2 P(l > r) / m
        pieces of S                     sum over l >= S of p(l) (l - S + 1) / m
    """
    unit = math.gcd(seq_length, *documents.lengths)
    whole, size = np.array(documents.lengths) // unit, seq_length // unit
    part = np.array(documents.counts) / np.sum(documents.counts)
    begins = part / np.dot(part, whole)
    inside, long = whole < size, whole >= size
    tokens = [begins[inside] * (size - whole[inside] + 1.0) * whole[inside]]
    squares = [tokens[0] * whole[inside]]
    # Runs of lengths that are cut equally often: P(l > r) changes at the documents' lengths only.
    steps = np.unique(np.rint(_STEP ** np.arange(math.ceil(math.log(size, _STEP)) + 1)).astype(np.int64))
    edges = np.unique(np.concatenate([[1], steps[steps < size], whole[inside], [size]]))
    first, count = edges[:-1].astype(float), np.diff(edges).astype(float)
    tail = np.append(np.cumsum(begins[::-1])[::-1], 0.0)
    often = 2 * tail[np.searchsorted(whole, edges[:-1], side="right")]
    tokens.append(often * count * (first + (count - 1) / 2))
    squares.append(often * count * (first**2 + first * (count - 1) + (count - 1) * (2 * count - 1) / 6))
    full = np.dot(begins[long], whole[long] - size + 1.0) * size
    tokens.append(np.array([full]))
    squares.append(np.array([full * size]))
    return group_pieces(np.concatenate(tokens), np.concatenate(squares), size, unit)


def group_pieces(
    tokens: NDArray[np.float64], squares: NDArray[np.float64], size: int, unit: int
) -> tuple[DocumentClass, ...]:
    """Return classes of as many tokens and pairs, counted alike.

    Args:
        tokens: tokens in pieces of each length, in units.
        squares: sum of the squares of these pieces' lengths.
        size: tokens of a sequence, in units.
        unit: tokens of a unit.
    """
    held = tokens > 0
    tokens, squares = tokens[held], squares[held]
    order = np.argsort(squares / tokens, kind="stable")
    tokens, squares = tokens[order], squares[order]
    weight = (tokens / tokens.sum() + squares / squares.sum()) / 2
    number = np.minimum(((np.cumsum(weight) - weight) * _CLASSES).astype(int), _CLASSES - 1)
    return tuple(
        DocumentClass(
            float(tokens[number == one].sum() / size),
            float(squares[number == one].sum() / tokens[number == one].sum() * unit),
        )
        for one in np.unique(number)
    )
