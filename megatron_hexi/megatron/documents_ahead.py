"""Documents of the next micro-batch: read on the host, with split tables derived while this one runs.

Where a rank reads the data itself, it fetches each sample one step ahead, in the training thread and in the
same order, and another thread derives the next sample's tables. So a rank waits neither for its device to
read the ends of documents, nor for the tables of 128 documents. Ranks that receive their batch from another
tensor-parallel rank read it from the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.patching import patched
from megatron_hexi.runtime.call_rows import on_device

Documents = tuple[int, ...]

_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hexi-documents")


#: Entries of a batch with the ends of its documents; those with padding first.
END_KEYS = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens", "cu_seqlens_q")


def ends_in(batch: Mapping[str, Any]) -> Any:
    """Return the ends of a batch's documents, with padding where it has both; ``None`` without documents."""
    return next((batch[key] for key in END_KEYS if batch.get(key) is not None), None)


class DocumentsAhead:
    """The documents of the current sample and of the next, known before attention needs them."""

    def __init__(self) -> None:
        self._taken: Documents | None = None
        self._next: tuple[Session, Documents, Future[None]] | None = None

    def take(self, sample: Any, seq_length: int) -> None:
        """Note the sample that enters training."""
        self._taken = documents_of(sample, seq_length)

    def prepare(self, session: Session, sample: Any) -> None:
        """Derive a sample's tables in the background."""
        documents = documents_of(sample, session.seq_length)
        if documents is not None:
            work = _worker.submit(session.attention.schedules.prepare, documents)
            self._next = session, documents, work

    def of(self, ends: Tensor) -> Documents | None:
        """Return the documents of the current sample if these are their ends; ``None`` otherwise.

        On a GPU values are compared there, without waiting; other values end the job.
        """
        known = self._taken
        if known is None or ends.numel() != len(known) + 1:
            return None
        places = torch.tensor([0, *itertools.accumulate(known)], dtype=ends.dtype)
        if not ends.is_cuda:
            return known if torch.equal(ends.flatten(), places) else None
        same = (ends.flatten() == on_device(places, ends.device)).all()
        torch._assert_async(same, "documents of a batch are not those of the sample that was read last")
        return known

    def wait(self, session: Session, documents: Documents) -> None:
        """Wait for the tables of these documents, if they are being derived."""
        if self._next is not None and self._next[:2] == (session, documents):
            self._next[2].result()
            self._next = None


AHEAD = DocumentsAhead()


def documents_of(sample: Any, seq_length: int) -> Documents | None:
    """Return the lengths of a sample's documents; ``None`` where the sample has no ends.

    Args:
        sample: a sample of a data loader; ends of documents [1, n], padded with the sequence's length.
    """
    if not isinstance(sample, dict):
        return None
    ends = ends_in(sample)
    if not isinstance(ends, Tensor) or ends.is_cuda or (ends.dim() == 2 and ends.shape[0] != 1):
        return None
    flat = ends.flatten()
    places: list[int] = flat[: int((flat < seq_length).sum()) + 1].tolist()  # the padding is long
    if places[0] != 0 or places[-1] != seq_length:
        return None
    return tuple(stop - start for start, stop in itertools.pairwise(places))


class Prefetched:
    """An iterator of samples that fetches each sample before it is needed."""

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples
        self._fetched: Callable[[], Any] | None = None

    def __iter__(self) -> Prefetched:
        return self

    def __next__(self) -> Any:
        """Return the next sample, or raise the error of its fetching."""
        fetched, self._fetched = self._fetched or self._fetch(), None
        sample = fetched()
        self._fetched = self._fetch()
        session = active_session()
        if session is not None:
            try:
                following = self._fetched()
            except Exception:  # raised at its turn
                return sample
            AHEAD.prepare(session, following)
        return sample

    def _fetch(self) -> Callable[[], Any]:
        try:
            sample = next(self._samples)
        except Exception as problem:
            return functools.partial(_raise, problem)
        return lambda: sample


def _raise(problem: Exception) -> Any:
    raise problem


@patched(
    "megatron.core.rerun_state_machine:RerunDataIterator.__next__",
    why="derives the split tables of the next micro-batch's documents while this one runs",
)
def _one_ahead(original: Callable[[Any], Any], self: Any) -> Any:
    session = active_session()
    if session is None:
        return original(self)
    terms = session.given.terms
    if terms.has_documents and terms.reads_ahead and not isinstance(self.iterable, Prefetched):
        self.iterable = Prefetched(self.iterable)
    sample = original(self)  # or a sample that Megatron replays
    AHEAD.take(sample, session.seq_length)
    return sample


DOCUMENTS_AHEAD_PATCHES = (_one_ahead,)
