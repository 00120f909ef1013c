"""Iterations of packed documents that are drawn at random: micro-batches differ in their attention.

The cost model and the replay time a micro-batch of the mean sequence. Here each micro-batch has a random
sequence, so that replicas wait for the one with the longest documents, and stages for the micro-batch that
takes longest. Where documents are cut over all groups, the cost model times some of the sequences, and the
others by their pairs of query and key between these. Where they are dealt out, a domain takes as long as its
slowest unit by the plan's rates, after the runtime has balanced the batch (`plan.batch_balance`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, Timing
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.once import iteration_phases
from megatron_hexi.models import Documents, Job
from megatron_hexi.models.documents import DocumentClass, group_pieces
from megatron_hexi.plan import Plan
from megatron_hexi.plan.batch_balance import balanced_domain, even_seconds, unit_seconds
from megatron_hexi.plan.units import domain_rows

#: Lengths of the pieces of documents of one sequence.
Pieces = tuple[int, ...]
SEED = 1
#: Iterations that are drawn: so many that they have about this many sequences, within limits.
_SEQUENCES, _LEAST, _MOST = 256, 2, 8
#: Sequences that the cost model times.
_TIMED = 24


@dataclass(frozen=True)
class DrawnDocuments:
    """Iterations of random documents.

    Args:
        seed: seed of the random numbers.
        iterations_s: seconds of each iteration.
        even_s: seconds of an iteration if each of its micro-batches took as long as they do in the mean.
    """

    seed: int
    iterations_s: tuple[float, ...]
    even_s: float

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration."""
        return float(np.mean(self.iterations_s))

    @property
    def imbalance(self) -> float:
        """Part by which iterations take longer because their micro-batches differ."""
        return self.mean_s / self.even_s - 1


def draw_documents(
    plan: Plan, job: Job, cluster: Cluster, gpus: Sequence[int] | None = None, seed: int = SEED
) -> DrawnDocuments:
    """Return iterations of random documents, by the cost model.

    Args:
        job: the job, with documents.
        gpus: number in the cluster of each rank's GPU; ``None``: see `CostModel.estimate`.

    Raises:
        PlanError: the plan was made for another job.
        ClusterError: the plan's units do not match the cluster, or a GPU cannot do the job.
    """
    documents = job.documents
    assert documents is not None, "the caller asks for documents only"
    timing, batch = CostModel(job, cluster).timing(plan, gpus), job.global_batch_size
    count = min(_MOST, max(_LEAST, _SEQUENCES // batch))
    drawn = list(itertools.islice(documents.drawn(job.seq_length, seed), batch * count))
    last = np.cumsum(timing.micro_batches).tolist()
    # The sequences of each iteration that each replica takes.
    own = [
        [drawn[n * batch + stop - size : n * batch + stop] for n in range(count)]
        for stop, size in zip(last, timing.micro_batches.tolist(), strict=True)
    ]
    if documents.dealt:
        weights = [_dealt(plan, timing, replica, taken) for replica, taken in enumerate(own)]
    else:
        weights = _cut(plan, job, cluster, gpus, timing, own)
    seconds = [_iteration_s(timing, [held[n] for held in weights]) for n in range(count)]
    mean = float(np.mean([held.mean() for held in weights]))
    even = [np.full(held.shape[1], mean) for held in weights]
    return DrawnDocuments(seed, tuple(seconds), _iteration_s(timing, even))


def _iteration_s(timing: Timing, weights: Sequence[Floats]) -> float:
    """Return the seconds of an iteration from the relative seconds of each replica's micro-batches."""
    replicas = [
        replace(pipeline, weights=tuple(own.tolist())).phases
        for pipeline, own in zip(timing.pipelines, weights, strict=True)
    ]
    return iteration_phases(replicas, timing.once, timing.spread).total


class _Sequence(Documents):
    """The pieces of documents of one sequence."""

    def classes(self, seq_length: int) -> tuple[DocumentClass, ...]:
        """Return the pieces, grouped."""
        tokens = np.array(self.lengths) * np.array(self.counts)
        return group_pieces(tokens, tokens * np.array(self.lengths), seq_length, 1)


def _cut(
    plan: Plan,
    job: Job,
    cluster: Cluster,
    gpus: Sequence[int] | None,
    timing: Timing,
    own: Sequence[Sequence[Sequence[Pieces]]],
) -> list[Floats]:
    """Return the seconds of each replica's sequences relative to the mean sequence, [iterations, taken].

    Documents are cut over all groups; the slowest stage counts.

    Args:
        own: sequences that each replica takes in each iteration.
    """
    by_pairs = {_squares(pieces): pieces for replica in own for taken in replica for pieces in taken}
    every = sorted(by_pairs)
    known = [every[n] for n in np.unique(np.linspace(0, len(every) - 1, _TIMED).astype(int)).tolist()]
    timed = []
    for squares in known:
        lengths, counts = np.unique(by_pairs[squares], return_counts=True)
        documents = _Sequence(tuple(lengths.tolist()), tuple(counts.astype(float).tolist()))
        timed.append(CostModel(replace(job, documents=documents), cluster).timing(plan, gpus))
    found = []
    for replica, iterations in enumerate(own):
        mean_s, *seconds = (
            max(phases.total for phases in one.pipelines[replica].stage_phases) for one in (timing, *timed)
        )
        asked = np.array([[_squares(pieces) for pieces in taken] for taken in iterations])
        found.append(np.interp(asked, known, seconds) / mean_s)
    return found


def _squares(pieces: Pieces) -> int:
    return sum(length * length for length in pieces)


def _dealt(plan: Plan, timing: Timing, replica: int, own: Sequence[Sequence[Pieces]]) -> Floats:
    """Return the seconds of a replica's sequences, relative to the mean sequence, [iterations, taken].

    Documents are dealt out by the rates of the units of each stage; the slowest stage counts.
    """
    stages = timing.pipelines[replica].stage_phases
    rows = [row for row in domain_rows(plan, stages=len(stages)) if row.replica == replica]
    found = np.zeros((len(own), len(own[0])))
    for row in rows:
        domain, rates, phases = row.domain, row.rates, stages[row.stage]
        assert rates is not None, "documents are dealt out where a plan has rates"
        even = np.mean([even_seconds(domain, pieces, rates) for taken in own for pieces in taken])
        slowest = [
            [max(unit_seconds(balanced_domain(domain, pieces, rates), pieces, rates)) for pieces in taken]
            for taken in own
        ]
        moved = phases.communication
        found = np.maximum(found, moved + (phases.total - moved) * np.array(slowest) / even)
    return found / max(phases.total for phases in stages)
