"""Attention masks: causal or full, with or without a sliding window and documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_hexi.plan.layout import consecutive
from megatron_hexi.plan.model import Range


@dataclass(frozen=True)
class Mask:
    """An attention mask: the keys that each query sees, within the query's document.

    Args:
        causal: whether a token sees only itself and earlier tokens. Windows and documents need a causal mask.
        window: number of earlier keys that a query sees; ``None``: all earlier keys.
        documents: lengths of the documents of the sequence; ``None``: the sequence is one document.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.causal or (self.window is None and self.documents is None)

    def ranges(self, seq_length: int) -> tuple[Range, ...]:
        """Return the range of positions of each document that is not empty.

        Args:
            seq_length: tokens of the sequence; equals the sum of the documents' lengths.
        """
        return _ranges((seq_length,) if self.documents is None else self.documents, seq_length)


@lru_cache(maxsize=64)  # asked for each pair of groups
def _ranges(documents: tuple[int, ...], seq_length: int) -> tuple[Range, ...]:
    ranges = tuple((start, stop) for start, stop in consecutive(documents) if start < stop)
    assert sum(documents) == seq_length, "documents cover the sequence"
    return ranges
