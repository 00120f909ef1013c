"""The terms of memory on a GPU and in host memory, each with its tag: remedy, growth and duration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

import numpy as np

from megatron_hexi.cost.arrays import Floats

Grows = Literal["tokens", "heads"]
Lasts = Literal["always", "kept", "layer", "loss", "images"]


@dataclass(frozen=True)
class _MemoryTerms:
    """Bytes of memory by term."""

    @classmethod
    def of_unit(cls, terms: Mapping[str, Floats], unit: int) -> Self:
        """Return one unit's bytes from those of all units by term, [U]."""
        return cls(**{name: float(values[unit]) for name, values in terms.items()})

    @property
    def total(self) -> float:
        """Sum of all terms, bytes."""
        return sum(self.terms.values())

    @property
    def terms(self) -> dict[str, float]:
        """Bytes of each term by name; the encoder's where there is one."""
        found = {term.name: getattr(self, term.name) for term in fields(self)}
        return {name: size for name, size in found.items() if name != "encoder" or size}


@dataclass(frozen=True)
class Tag:
    """Remedy, growth and duration of a memory term.

    Args:
        remedy: advice on making the term smaller, for messages.
        grows: quantity with which the term grows: the unit's `tokens`, or its `heads` times the tokens of its
            group; ``None``: neither.
        lasts: duration of the term: `always`; from a micro-batch's forward pass to its backward pass
            (`kept`), of its `images` by themselves; while one `layer` is computed; while the `loss` is
            computed.
    """

    remedy: str
    grows: Grows | None
    lasts: Lasts


def _tagged(grows: Grows | None, lasts: Lasts, remedy: str, **more: Any) -> Any:
    return field(metadata={"tag": Tag(remedy, grows, lasts)}, **more)


@dataclass(frozen=True)
class Memory(_MemoryTerms):
    """Bytes on one GPU at the peak of an iteration.

    Args:
        weights: weights of the GPU's stage.
        gradients: gradients of these weights.
        optimizer: the GPU's part of the optimizer's state.
        activations: activations outside attention, of all micro-batches in flight.
        attention: activations inside attention, of all micro-batches in flight.
        working_set: tensors of the layer being computed: sums, keys and values in flight, all-to-all buffers
            and recomputed activations; also rows that are being sent between stages.
        logits: excess of the loss's tensors, if the stage has the loss, over the working set; the two are not
            needed at the same time.
        reserve: libraries, their workspaces and buffers, and the allocator.
        encoder: activations of the encoder of images, of all micro-batches in flight.
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
    encoder: float = _tagged(None, "images", "give it fewer images, or recompute more", default=0.0)


#: The tag of each term of `Memory`; a term without a tag is an error here.
TAGS: dict[str, Tag] = {term.name: term.metadata["tag"] for term in fields(Memory)}


def sum_terms(terms: Mapping[str, Floats], lasts: Lasts, grows: Grows | None = None) -> Floats:
    """Return the sum of the terms with a tag, bytes.

    Args:
        lasts: duration of the terms, see `Tag`.
        grows: growth of the terms, see `Tag`; ``None``: any.
    """
    tagged = (name for name, tag in TAGS.items() if tag.lasts == lasts and grows in (None, tag.grows))
    total: Floats = sum((terms[name] for name in tagged), np.zeros(()))
    return total


@dataclass(frozen=True)
class HostMemoryTerms(_MemoryTerms):
    """Bytes in host memory that one GPU offloads.

    Args:
        weights: weights of ministages.
        gradients: gradients of these weights, and of weights whose optimizer step runs on the host.
        optimizer: fp32 weights and optimizer state.
        activations: rows that entered ministages.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
