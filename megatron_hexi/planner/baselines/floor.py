"""A time that layouts cannot beat, and memory that they need: cheap enough to spare timing most of them.

    group     >= its longest token work + the longest of its members' attention work and keys from other nodes
                                                                            in each pass
    stage     >= layers x (its slowest group in each pass) + its longest logits
    replica   >= sum of its stages + (micro-batches - 1) x slowest stage
    iteration >= slowest replica

The terms of computing and of tensor-parallel sums are those of cost/layer.py, at the layout's own sizes, but
for the keys' gradients. Keys of groups without a member on a unit's node cross that unit's best link to other
nodes, in the backward pass their gradients too. All other communication, waits inside the exchange, gradients
and the optimizer are left out. Jobs are causal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_hexi.cluster import Cluster, LinkId
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.collectives import tensor_parallel_seconds
from megatron_hexi.cost.compute import (
    Speeds,
    device_speeds,
    logits_times,
    merge_times,
    own_block_times,
    rectangle_times,
    token_times,
)
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.memory import GIB, Holdings, stage_memory
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Layout


class _Blocks(NamedTuple):
    """Groups of a domain by size.

    Args:
        sizes: that occur, [C].
        number: which of them each group has, [N].
        outside: groups of each size that stand outside of each group, [N, C].
        inside: likewise inside.
    """

    sizes: Floats
    number: Ints
    outside: Ints
    inside: Ints


class _Arrays(NamedTuple):
    """A layout: units, tokens, heads and group of each, [U]; first unit and tokens of groups, [N]."""

    units: Ints
    tokens: Ints
    heads: Ints
    group: Ints
    first: Ints
    totals: Ints

    @classmethod
    def of(cls, layout: Layout) -> _Arrays:
        """Those of a layout."""
        units, tokens, heads = (
            np.array([value for part in layout.parts for value in getattr(part, name)])
            for name in ("units", "tokens", "heads")
        )
        sizes = np.array([len(part.units) for part in layout.parts])
        first = np.cumsum(sizes) - sizes
        group = np.repeat(np.arange(len(sizes)), sizes)
        return cls(units, tokens, heads, group, first, np.add.reduceat(tokens, first))


class Floor:
    """Lower bounds for layouts of one fleet.

    Args:
        fleet: the units that the layouts' numbers mean.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._job = fleet.job
        workload = fleet.job.workload()
        #: Keys and values of one token for a query head, bytes.
        element = fleet.job.micro_batch_size * fleet.job.model.head_dim * fleet.job.element_bytes
        self._token_bytes = 2 * element / workload.queries_per_kv
        stages = range(fleet.job.pipeline_parallel)
        ranks = fleet.cluster.ranks
        #: Of each unit on each stage: its node, and its best link to other nodes, bytes/s.
        self._nodes = np.array(
            [[ranks[unit.gpus[stage][0]].node for unit in fleet.units] for stage in stages]
        )
        nodes = fleet.cluster.nodes
        self._outside = np.array([_way_out(fleet.cluster, node) for node in range(len(nodes))])[self._nodes]
        self._inside = np.array([(node.bandwidth, node.latency_s) for node in nodes]).T
        self._kinds = np.array([unit.kind for unit in fleet.units])
        self._speeds = [[device_speeds(device, fleet.job) for device in kind.devices] for kind in fleet.kinds]
        #: Bytes of a GPU of each kind on each stage.
        self._usable = GIB * np.array([[one.usable_gib for one in kind.devices] for kind in fleet.kinds])
        #: Replicas that are cut alike take as long, and need as much.
        self._known: dict[tuple[object, ...], float] = {}
        self._roomy: dict[tuple[object, ...], bool] = {}

    def seconds(self, layouts: Iterable[Layout]) -> float:
        """Seconds that an iteration of one layout a replica takes at least."""
        return max(self._replica(layout) for layout in layouts)

    def may_fit(self, layouts: Sequence[Layout]) -> bool:
        """Whether memory may suffice: for all but the keys under way it does."""
        shards = sum(len(part.units) for layout in layouts for part in layout.parts)
        return all(self._has_room(layout, shards) for layout in layouts)

    def _has_room(self, layout: Layout, shards: int) -> bool:
        one = _Arrays.of(layout)
        kinds, nothing = self._kinds[one.units], np.zeros(len(one.units))
        name = layout.micro_batches, shards, *map(bytes, (kinds, one.tokens, one.heads, one.first))
        if name not in self._roomy:
            held = Holdings(
                tokens=one.tokens.astype(float),
                group_tokens=one.totals[one.group].astype(float),
                heads=one.heads.astype(float),
                kv=one.heads / self._job.workload().queries_per_kv,
                micro_batches=np.array([layout.micro_batches]),
                flights=Flights(nothing, nothing),
            )
            self._roomy[name] = all(
                bool((sum(stage_memory(self._job, stage, held, 1, shards).values()) <= usable).all())
                for stage, usable in enumerate(self._usable[kinds].T)
            )
        return self._roomy[name]

    def _replica(self, layout: Layout) -> float:
        one = _Arrays.of(layout)
        kinds, outside = self._kinds[one.units], self._outside[:, one.units]
        nodes = self._nodes[:, one.units]
        inside = self._inside[:, nodes]
        nodes = np.array([np.unique(stage, return_inverse=True)[1] for stage in nodes])
        arrays = kinds, one.tokens, one.heads, one.first, nodes, outside, inside
        key = layout.micro_batches, *(array.tobytes() for array in arrays)
        if key not in self._known:
            keys, rows = one.heads * self._token_bytes, self._job.micro_batch_size * one.tokens.astype(float)
            stages = [
                self._stage(
                    stage,
                    kinds,
                    one,
                    2 * tensor_parallel_seconds(self._job, rows, *inside[:, stage]),
                    keys * _from_other_nodes(nodes[stage], one.group, one.totals) / outside[stage],
                )
                for stage in range(self._job.pipeline_parallel)
            ]
            self._known[key] = sum(stages) + (layout.micro_batches - 1) * max(stages)
        return self._known[key]

    def _stage(self, stage: int, kinds: Ints, one: _Arrays, sums: Floats, wire: Floats) -> float:
        """Seconds of a micro-batch on a pipeline stage.

        Args:
            stage: which.
            kinds: of each unit.
            one: the layout.
            sums: seconds of each unit's tensor-parallel sums, one way.
            wire: seconds in which each unit's heads of keys come from other nodes, one way.
        """
        tokens, heads, group, first = one.tokens, one.heads, one.group, one.first
        job = self._job
        last = stage == job.pipeline_parallel - 1
        rows = job.micro_batch_size * tokens.astype(float)
        token, attention = np.zeros((2, len(tokens))), np.zeros((2, len(tokens)))
        logits = np.zeros(len(tokens))
        blocks = _blocks(one.totals)
        for kind in np.unique(kinds):
            speeds, own = self._speeds[kind][stage], kinds == kind
            token[:, own] = np.array(token_times(speeds, job, rows[own])) + sums[own]
            attention[:, own] = heads[own] * self._attention(speeds, blocks)[:, group[own]]
            if last:
                logits[own] = sum(logits_times(speeds, job, rows[own]))
        attention = np.maximum(attention, [wire, 2 * wire])
        longest_token, longest_attention = (
            np.maximum.reduceat(work, first, axis=1) for work in (token, attention)
        )
        passes = longest_token + longest_attention
        seconds = passes.max(axis=1).sum()
        if job.recompute == "full":
            seconds += passes[0].max()
        elif job.recompute == "selective":
            seconds += longest_attention[0].max()
        return float(job.stage_layers * seconds + logits.max())

    def _attention(self, speeds: Speeds, blocks: _Blocks) -> Floats:
        """Seconds of one head in each group, [2, groups]."""
        job = self._job
        sizes, number = blocks.sizes, blocks.number
        fronts = np.floor(sizes / 2)
        own = own_block_times(speeds, job, sizes, True)
        seconds = np.array([way[number] for way in own])
        # All queries see an outer group's front half; those of the back half see all of an inner group.
        for queries, keys, counts in (
            (sizes, fronts, blocks.outside),
            (sizes - fronts, sizes, blocks.inside),
        ):
            seen = (queries[:, None] > 0) & (keys > 0)
            blocks_s = rectangle_times(speeds, job, queries[:, None], keys)
            merges_s = merge_times(speeds, job, queries[:, None])
            for way in range(2):
                one = np.where(seen, blocks_s[way] + merges_s[way], 0.0)
                seconds[way] += (counts * one[number]).sum(axis=1)
        return seconds


def _way_out(cluster: Cluster, node: int) -> float:
    """Bytes/s of a GPU's best link to other nodes; thinner ones further up are left out."""
    if len(cluster.nodes) == 1:
        return np.inf
    if cluster.tiers:
        return cluster.tiers[0].bandwidth * cluster.tiers[0].factors.get(node, 1.0)
    return max(cluster.capacity(LinkId(1, "node", node, way)) for way in ("out", "in"))


def _from_other_nodes(nodes: Ints, group: Ints, totals: Ints) -> Floats:
    """Tokens that each unit's group sees of groups that have no member on the unit's node, [U]."""
    groups = len(totals)
    beside = np.unique(nodes * groups + group)
    number = np.searchsorted(beside, nodes * groups + group)
    node, near = beside // groups, beside % groups
    seen = _seen(totals, np.zeros(groups, dtype=np.int64), np.arange(groups))
    return seen[group] - _seen(totals[near], node, near)[number]


def _seen(totals: Ints, node: Ints, place: Ints) -> Floats:
    """Keys that each group sees of the others on its node: the front half of outer ones, all of inner ones.

    Args:
        totals: tokens of each.
        node: of each, ascending.
        place: of each among all groups, ascending on a node, from the outermost.
    """
    whole, fronts = np.cumsum(totals), np.cumsum(totals // 2)
    starts = np.searchsorted(node, node)
    ends = np.searchsorted(node, node, side="right") - 1
    outer = fronts - totals // 2 - (fronts - totals // 2)[starts]
    inner = whole[ends] - whole
    return (outer + inner).astype(float)


def _blocks(totals: Ints) -> _Blocks:
    sizes, number = np.unique(totals, return_inverse=True)
    one = number[:, None] == np.arange(len(sizes))
    upto = np.cumsum(one, axis=0)
    return _Blocks(sizes.astype(float), number, upto - one, upto[-1] - upto)
