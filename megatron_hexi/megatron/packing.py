"""Sequences of documents in Megatron's packed path (THD), in which attention stays within each document.

A rank's shard has other positions than without documents, and as many tokens; where documents are assigned by
units' rates (``--hexi-batch-shares``), another number of tokens in every batch. Shards are derived where
Megatron provides the documents' ends: in the batch, at the rotary embeddings, in each layer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.documents_ahead import AHEAD
from megatron_hexi.megatron.session import LocalShard, Session, local_shard
from megatron_hexi.plan import Mask


@dataclass(frozen=True)
class PackedShard:
    """This rank's part of a sequence.

    Args:
        documents: lengths of its documents; ``None``: it is not packed.
        in_document: position of each row in its document, [L].
    """

    documents: tuple[int, ...] | None
    shard: LocalShard
    in_document: Tensor


# Cached for each sequence: on a GPU, reading ends that were not read on the host waits for the device.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packed_shard(session: Session, ends: Tensor | None) -> PackedShard:
    """Return this rank's part of a sequence.

    Args:
        ends: 0 and the end of each document, ascending, [documents + 1] or [1, documents + 1];
            ``None``: the sequence is not packed.

    Raises:
        PlanError: the documents are not as long as the plan's sequence.
    """
    if ends is None:
        return PackedShard(None, session.shard, session.shard.positions)
    known: tuple[Session, PackedShard] | None = _known.get(ends)
    if known is not None and known[0] is session:
        return known[1]
    documents_read = AHEAD.of(ends)
    places = ends.flatten().tolist() if documents_read is None else [0, *itertools.accumulate(documents_read)]
    documents = tuple(stop - start for start, stop in itertools.pairwise(places))
    AHEAD.wait(session, documents)
    if places[0] != 0 or places[-1] != session.seq_length or min(documents) < 0:
        raise PlanError(
            f"documents from {places[0]} to {places[-1]}, the plan {session.given.path} was made for "
            f"sequences of {session.seq_length} tokens; give --micro-batch-size 1, or a plan for this length"
        )
    schedule = session.attention.schedules(Mask(documents=documents))
    shard = local_shard(schedule, session.given.row_multiple, ends.device)
    starts = ends.flatten()
    document = torch.searchsorted(starts, shard.positions.to(starts.dtype), right=True) - 1
    packed = PackedShard(documents, shard, shard.positions - starts[document])
    _known[ends] = session, packed
    return packed


def document_ends(packed: Any) -> Tensor | None:
    """Return the ends of documents, with padding where Megatron has both; ``None`` without documents."""
    if packed is None:
        return None
    ends: Tensor = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    return ends
