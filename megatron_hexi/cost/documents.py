"""Packed documents in the groups of a domain: in each a smaller copy of a whole sequence's blocks.

A document is cut over all groups in a zigzag, so its part of a group's tokens is the group's part of the
sequence, and its blocks are those of the layout, `part` = its length / the sequence's times as long. Where
documents are dealt out anew in every batch, a group has as a whole those that are no longer than its own
tokens, and longer ones are cut: its pairs of query and key are as many, but fewer keys are another group's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.models.job import Job


class PackedClass(NamedTuple):
    """Documents of one class.

    Args:
        share: part of all tokens that is in such documents.
        part: length of one, as a part of a sequence.
        is_cut: whether it is cut over all groups, for each of some groups.
    """

    share: float
    part: float
    is_cut: Bools | bool

    def own(self, tokens: Floats, seq_length: int) -> tuple[Floats | float, Floats]:
        """Return the mean number of documents of which a group has tokens, and its tokens of each."""
        count, own = self.share / self.part, tokens * self.part
        if self.is_cut is True:
            return count, own
        length = self.part * seq_length
        return (
            np.where(self.is_cut, count, self.share * tokens / length),
            np.where(self.is_cut, own, length),
        )


#: A sequence that is one document.
ONE_DOCUMENT = PackedClass(1.0, 1.0, True)


def packed_in(job: Job, tokens: Floats | Ints | float) -> Iterator[PackedClass]:
    """Yield each class of documents, for groups of these numbers of tokens."""
    dealt = job.documents is not None and job.documents.dealt
    for share, length in job.packed:
        yield PackedClass(share, length / job.seq_length, length > tokens if dealt else True)


def cut_share(job: Job, tokens: Floats | Ints | float) -> Floats | float:
    """Return the part of tokens in documents that are cut, for groups of these numbers of tokens."""
    if job.documents is None or not job.documents.dealt:
        return 1.0
    return sum((one.share * np.asarray(one.is_cut) for one in packed_in(job, tokens)), np.zeros(()))
