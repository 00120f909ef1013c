"""Which keys a query sees: what layers and batches ask for beside the plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_hexi.plan.layout import consecutive
from megatron_hexi.plan.model import Range


@dataclass(frozen=True)
class Mask:
    """A query sees the keys of its document; a causal one none after itself, nor any behind its window.

    Args:
        causal: whether a token sees itself and earlier tokens only, or all. Windows and documents need it.
        window: how many keys before itself a query sees; ``None``: all.
        documents: lengths of the documents that the sequence consists of; ``None``: it is one.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.causal or (self.window is None and self.documents is None)

    def ranges(self, seq_length: int) -> tuple[Range, ...]:
        """Positions of the documents, without empty ones.

        Args:
            seq_length: tokens of the sequence; the documents add up to it.
        """
        return _ranges((seq_length,) if self.documents is None else self.documents, seq_length)


@lru_cache(maxsize=64)  # asked for each pair of groups
def _ranges(documents: tuple[int, ...], seq_length: int) -> tuple[Range, ...]:
    ranges = tuple((start, stop) for start, stop in consecutive(documents) if start < stop)
    assert sum(documents) == seq_length, "documents cover the sequence"
    return ranges
