"""Messages between the ranks of an expert domain, and their seconds.

A rank with T rows sends k T h elements, e / E of them to a rank with e experts, and the same rows to every
slice of a cut expert: that is Megatron's alltoall dispatcher, which sends a row to each of its experts. Where
a plan names nodes, the row travels once to each node that holds some of its experts, with the probabilities
of all experts of that node, and to each of its experts inside the node. Experts are taken as equally likely:
of a node with e experts a row needs at least one with the probability 1 - C(E - e, k) / C(E, k).

Shape letters: R ranks, M messages, E experts of a layer, k experts of a row, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.recent import Recent
from megatron_hexi.models.job import Job

#: All-to-alls of stages that are kept.
_MOST_KEPT = 64
#: Bytes of a probability, which is in fp32.
_PROBABILITY = 4


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """The ranks of a stage as they exchange rows of experts.

    Args:
        gpus: the GPU of each rank, [R].
        domain: number of its expert domain, [R].
        node: number of its node; equal for all ranks whose rows go to each expert by itself, [R].
        rows: number of its rows of a micro-batch, [R].
        count: number of experts, or slices, that it holds, [R].
        whole: the same in whole experts, of which a slice is a part, [R].
    """

    gpus: Ints
    domain: Ints
    node: Ints
    rows: Floats
    count: Ints
    whole: Floats


@dataclass(frozen=True, eq=False)
class ExpertMessages:
    """Messages that travel at the same time; those back from the experts are the same, reversed.

    Args:
        src: sending rank of each message, an index into the ranks of the stage, [M].
        dst: receiving rank, likewise, [M].
        size: bytes of each message, [M].
    """

    src: Ints
    dst: Ints
    size: Floats


def exchange_seconds(job: Job, ranks: ExpertRanks, links: LinkTable) -> Floats:
    """Return the seconds of the longest messages to experts in one layer in each expert domain, [R].

    Messages inside nodes follow those between them.
    """
    seconds = np.zeros(len(ranks.gpus))
    for sent in expert_messages(job, ranks):
        lasting = links.message_seconds(ranks.gpus[sent.src], ranks.gpus[sent.dst], sent.size)
        longest = np.zeros(int(ranks.domain.max()) + 1)
        np.maximum.at(longest, ranks.domain[sent.src], lasting)
        seconds += longest[ranks.domain]
    return seconds


def expert_messages(job: Job, ranks: ExpertRanks) -> list[ExpertMessages]:
    """Return the messages to experts in one layer: between nodes, if there are nodes, and inside them."""
    (experts,) = job.model.routed
    row = job.model.hidden_size * job.element_bytes
    between, inside = [], []
    for number in np.unique(ranks.domain).tolist():
        own = np.flatnonzero(ranks.domain == number)
        rows = np.zeros(len(ranks.gpus))  # those that each rank sends on inside its node
        rows[own] = ranks.rows[own]
        for node in np.unique(ranks.node[own]).tolist():
            here = own[ranks.node[own] == node]
            held = float(ranks.whole[here].sum())
            share = 1 - _none_of(held, experts.count, experts.active)
            for src, dst in _gateways(ranks, own, here):
                between.append((src, dst, share * ranks.rows[src] * (row + _PROBABILITY * held)))
                rows[dst] += ranks.rows[src]
        for node in np.unique(ranks.node[own]).tolist():
            here = own[ranks.node[own] == node]
            src, dst = (axis.ravel() for axis in np.meshgrid(here, here, indexing="ij"))
            size = row * experts.active / experts.count * rows[src] * ranks.count[dst]
            moves = (src != dst) & (size > 0)
            inside.append((src[moves], dst[moves], size[moves]))
    steps = [ExpertMessages(*map(np.concatenate, zip(*inside, strict=True)))]
    return [ExpertMessages(*map(np.array, zip(*between, strict=True))), *steps] if between else steps


def _gateways(ranks: ExpertRanks, own: Ints, here: Ints) -> Iterator[tuple[int, int]]:
    """Yield ranks of other nodes, each with the rank that takes its rows (`ExpertDomain.gateway`).

    Args:
        own: ranks of the domain, [R].
        here: those on the node that takes the rows.
    """
    if not ranks.whole[here].any():
        return
    for node in np.unique(ranks.node[own]).tolist():
        home = own[ranks.node[own] == node]
        for place, src in enumerate(home.tolist() if node != ranks.node[here[0]] else ()):
            if ranks.rows[src]:
                yield src, int(here[place * len(here) // len(home)])


def _none_of(held: float, total: int, active: int) -> float:
    """Return the probability that none of a row's experts is among those held: C(E - e, k) / C(E, k)."""
    return float(np.prod([max(0.0, total - held - place) / (total - place) for place in range(active)]))


class ExpertExchanges:
    """Times all-to-alls of experts on one cluster, those of stages that are alike once.

    Args:
        links: the cluster's links.
        is_free: whether rows travel once to each of the cluster's nodes where that is faster than what the
            plan says: for plans that do not name nodes yet.
    """

    def __init__(self, links: LinkTable, *, is_free: bool = False) -> None:
        self._links, self._is_free = links, is_free
        self._kept = Recent[Floats](_MOST_KEPT)

    def seconds(self, job: Job, ranks: ExpertRanks) -> Floats:
        """Return `exchange_seconds` of a stage."""
        seconds = self._as_planned(job, ranks)
        if self._is_free:
            by_node = replace(ranks, node=self._links.nodes[ranks.gpus])
            seconds = np.minimum(seconds, self._as_planned(job, by_node))
        return seconds

    def _as_planned(self, job: Job, ranks: ExpertRanks) -> Floats:
        arrays = ranks.domain - ranks.domain.min(), ranks.node, ranks.rows, ranks.count, ranks.whole
        key = job, self._links.likeness(ranks.gpus), *(values.tobytes() for values in arrays)
        return self._kept.of(key, partial(exchange_seconds, job, ranks, self._links))
