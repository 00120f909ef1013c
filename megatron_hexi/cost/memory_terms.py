"""The terms of memory on a GPU and in host memory, and what readers go by: remedy, growth, duration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from megatron_hexi.cost.arrays import Floats

Grows = Literal["tokens", "heads"]
Lasts = Literal["always", "kept", "layer", "loss"]


@dataclass(frozen=True)
class _MemoryTerms:
    """Memory by term, bytes."""

    @property
    def total(self) -> float:
        """Sum of all terms, bytes."""
        return sum(self.terms.values())

    @property
    def terms(self) -> dict[str, float]:
        """The terms by name."""
        return {term.name: getattr(self, term.name) for term in fields(self)}


@dataclass(frozen=True)
class Tag:
    """Properties of a memory term that readers of the memory model go by.

    Args:
        remedy: what makes it smaller, for people.
        grows: what it grows with: the unit's own `tokens`, or its `heads` with the tokens of its group;
            ``None``: neither.
        lasts: how long it is there: `always`; from the forward pass of a micro-batch to its backward pass
            (`kept`); while one `layer` is computed; while the `loss` is.
    """

    remedy: str
    grows: Grows | None
    lasts: Lasts


def _tagged(grows: Grows | None, lasts: Lasts, remedy: str) -> Any:
    return field(metadata={"tag": Tag(remedy, grows, lasts)})


@dataclass(frozen=True)
class Memory(_MemoryTerms):
    """Bytes on one GPU at the peak of an iteration.

    Args:
        weights: of the GPU's stage.
        gradients: of the same.
        optimizer: its part of the optimizer's state.
        activations: kept for the backward pass outside attention, all micro-batches in flight.
        attention: kept inside attention, likewise.
        working_set: of the one layer under way: sums, keys and values in flight, all-to-all buffers,
            and what recomputation brings back; rows on their way between stages.
        logits: what the loss, where the stage has it, needs beyond the working set, which comes
            after it.
        reserve: libraries, their workspaces and buffers, and the allocator.
    """

    weights: float = _tagged(None, "always", "cut the model with more tensor or pipeline parallelism")
    gradients: float = _tagged(None, "always", "cut the model with more tensor or pipeline parallelism")
    optimizer: float = _tagged(None, "always", "use the distributed optimizer, or cut the model further")
    activations: float = _tagged(
        "tokens", "kept", "give it fewer tokens, recompute more, or shorten the context"
    )
    attention: float = _tagged("heads", "kept", "give it fewer heads, recompute more, or shorten the context")
    working_set: float = _tagged("heads", "layer", "give its group fewer tokens, or shorten the context")
    logits: float = _tagged(
        "tokens", "loss", "give it fewer tokens, or cut the vocabulary with tensor parallelism"
    )
    reserve: float = _tagged(None, "always", "give it fewer tokens")


#: The tag of each term of `Memory`; one without a tag is an error here.
TAGS: dict[str, Tag] = {term.name: term.metadata["tag"] for term in fields(Memory)}


def sum_terms(terms: Mapping[str, Floats], lasts: Lasts, grows: Grows | None = None) -> Floats:
    """The sum of the terms with a tag, bytes.

    Args:
        terms: arrays of bytes by the names of `Memory`'s terms.
        lasts: `Tag.lasts`.
        grows: `Tag.grows`; ``None``: any.
    """
    tagged = (name for name, tag in TAGS.items() if tag.lasts == lasts and grows in (None, tag.grows))
    total: Floats = sum((terms[name] for name in tagged), np.zeros(()))
    return total


@dataclass(frozen=True)
class HostMemoryTerms(_MemoryTerms):
    """Bytes in host memory of what one GPU's stage offloads.

    Args:
        weights: of ministages.
        gradients: of the same, and of what the host steps.
        optimizer: fp32 weights and state.
        activations: rows that entered ministages.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
