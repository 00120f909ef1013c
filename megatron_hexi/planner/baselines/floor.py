"""A time that layouts cannot beat, and memory that they need: cheap enough to spare timing most of them.

    group     >= its longest token work + the longest of its members' attention work, of the way of keys from
                 other nodes, and of an all-to-all to them                   in each pass
    stage     >= layers x (its slowest group in each pass) + longest logits + sends to the next stage
    replica   >= sum of its stages + (micro-batches - 1) x slowest stage + gradients and weights less a pass
    iteration >= slowest replica + optimizer

Computing, tensor-parallel sums, sends, gradients, weights and the optimizer are those of cost/ at the
layout's own sizes, but for the keys' gradients. Keys of groups without a member on a node cross that node's
links, in the backward pass their gradients too. Other messages, the smaller one of a pass's two all-to-alls,
and waits inside the exchange are left out. Jobs are causal, and layouts take all units of a fleet.

In a window a group's queries see as many keys as if its tokens were the sequence's first, or more, at the
best rates of blocks up to the window's size; keys of other groups take no time. Layers of several kinds are
counted each at its own times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_hexi.cluster import Cluster, LinkId, Passes
from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.collectives import pipeline_seconds, tensor_parallel_seconds
from megatron_hexi.cost.compute import (
    Speeds,
    device_speeds,
    logits_times,
    merge_times,
    optimizer_seconds,
    own_block_times,
    rectangle_times,
    token_times,
)
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.memory import GIB, Holdings, ModelPart, part_memory, part_params
from megatron_hexi.cost.reductions import repeated_turns
from megatron_hexi.cost.rings import Rings
from megatron_hexi.cost.stage import exposed_seconds
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Layout


class _Arrays(NamedTuple):
    """Layouts of several candidates, one after the other.

    Args:
        units: of the fleet, [V].
        tokens: of each, [V].
        heads: of each, [V].
        group: of each, [V].
        first: the first of each group, [N].
        totals: tokens of each group, [N].
        replica: of each group, [N].
        begin: the first group of each replica, [R].
        micro_batches: of each replica, [R].
        candidate: of each replica, [R].
        starts: the first replica of each candidate, [K].
    """

    units: Ints
    tokens: Ints
    heads: Ints
    group: Ints
    first: Ints
    totals: Ints
    replica: Ints
    begin: Ints
    micro_batches: Ints
    candidate: Ints
    starts: Ints

    @classmethod
    def of(cls, candidates: Sequence[Sequence[Layout]]) -> _Arrays:
        """Those of candidates, each of one layout a replica."""
        layouts = [layout for one in candidates for layout in one]
        parts = [part for layout in layouts for part in layout.parts]
        units, tokens, heads = (
            np.array([value for part in parts for value in getattr(part, name)])
            for name in ("units", "tokens", "heads")
        )
        group, first = _numbered([len(part.units) for part in parts])
        replica, begin = _numbered([len(layout.parts) for layout in layouts])
        candidate, starts = _numbered([len(one) for one in candidates])
        totals = np.add.reduceat(tokens, first)
        micro_batches = np.array([layout.micro_batches for layout in layouts])
        return cls(
            units, tokens, heads, group, first, totals, replica, begin, micro_batches, candidate, starts
        )

    def beside(self, values: Floats) -> tuple[Floats, Floats]:
        """Sums over the groups outside of each in its replica, and over those inside, [..., N, C] all."""
        before = np.cumsum(values, axis=-2) - values
        outside = before - before[..., self.begin, :][..., self.replica, :]
        whole = np.add.reduceat(values, self.begin, axis=-2)[..., self.replica, :]
        return outside, whole - values - outside


class Floor:
    """Lower bounds for layouts of one fleet, many candidates at once.

    Args:
        fleet: the units that the layouts' numbers mean.
        rings: of its cluster.
    """

    def __init__(self, fleet: Fleet, rings: Rings) -> None:
        self._fleet, self._job, self._links = fleet, fleet.job, rings.links
        job, cluster = fleet.job, fleet.cluster
        stages = np.arange(job.pipeline_parallel)
        #: First GPU of each unit on each stage, [S, units], and its node.
        self._gpus = np.array([[unit.gpus[stage][0] for unit in fleet.units] for stage in stages])
        self._nodes = self._links.nodes[self._gpus]
        devices = {id(one): one for kind in fleet.kinds for one in kind.devices}
        kinds = [[list(devices).index(id(one)) for one in kind.devices] for kind in fleet.kinds]
        #: Device of each unit on each stage, [S, units], among these.
        self._device = np.array([kinds[unit.kind] for unit in fleet.units]).T
        self._speeds = [device_speeds(one, job) for one in devices.values()]
        self._usable = GIB * np.array([one.usable_gib for one in devices.values()])
        self._inside = np.array([(node.bandwidth, node.latency_s) for node in cluster.nodes]).T
        self._outside = np.array([_way_out(cluster, node) for node in range(len(cluster.nodes))])
        self._per_gpu = bool(cluster.tiers) and cluster.tiers[0].per == "gpu"
        order = sorted(range(len(fleet.units)), key=lambda unit: fleet.units[unit].gpus)
        held = [(ModelPart.of_job(job, stage), self._gpus[stage, order], 1) for stage in stages.tolist()]
        self._turns = repeated_turns(job, held, rings)
        params = np.asarray(part_params(job, ModelPart.of_job(job, stages)), dtype=float)
        self._shards = len(fleet.units) if job.distributed_optimizer else 1
        owned = params / self._shards
        steps = np.array([optimizer_seconds(one, job, params, owned) for one in self._speeds])
        #: Seconds of all work at the best rates, and of the optimizer.
        self._work = job.global_batch_size * job.seq_length / fleet.ceiling_tokens_per_s
        self._step = float(steps[self._device, stages[:, None]].max())

    def least_s(self, replicas: int) -> float:
        """Seconds of an iteration of so many equal replicas, however they are laid out.

        All work at the best rates, while pipelines fill and drain; or, as gradients and weights hide behind
        one micro-batch at most, the work of the others and these.
        """
        job, work = self._job, self._work
        micro_batches = job.global_batch_size / job.micro_batch_size
        filled = work * (1 + (job.pipeline_parallel - 1) / micro_batches) + self._shown(np.inf, np.inf).max()
        others = work * (1 - replicas / micro_batches) + self._shown(0.0, 0.0).max()
        return float(self._step + max(filled, others))

    def may_fit(self, candidates: Sequence[Sequence[Layout]]) -> Bools:
        """Whether memory may suffice for each candidate: for all but the keys under way it does."""
        one, nothing = _Arrays.of(candidates), np.zeros(1)
        held = Holdings(
            tokens=one.tokens.astype(float),
            group_tokens=one.totals[one.group].astype(float),
            heads=one.heads.astype(float),
            kv=one.heads / self._job.workload().queries_per_kv,
            micro_batches=one.micro_batches[one.replica][one.group],
            flights=Flights(nothing, nothing),
        )
        part = ModelPart.of_job(self._job, np.arange(self._job.pipeline_parallel)[:, None])
        owned = part_params(self._job, part) / self._shards
        needed = sum(part_memory(self._job, part, held, 1, owned).values())
        fits = (needed <= self._usable[self._device[:, one.units]]).all(axis=0)
        return np.logical_and.reduceat(fits, one.first[one.begin[one.starts]])

    def seconds(self, candidates: Sequence[Sequence[Layout]]) -> Floats:
        """Seconds that an iteration of each candidate takes at least."""
        job, one = self._job, _Arrays.of(candidates)
        rows = job.micro_batch_size * one.tokens.astype(float)
        device, slots = self._device[:, one.units], np.arange(len(rows))
        sums = tensor_parallel_seconds(job, rows, *self._inside[:, self._nodes[:, one.units]])
        # All by stage, then unit, group or replica, then pass.
        part, mean, stages = ModelPart.of_job(job, np.arange(job.pipeline_parallel)), 0.0, 0.0
        for kind, held in zip(job.kinds, part.of_kinds(job.model), strict=True):
            token = np.array([token_times(speeds, kind, rows) for speeds in self._speeds])[device, :, slots]
            heads = one.heads[:, None] * self._attention(one, kind)[device, :, one.group]
            token = np.maximum.reduceat(token + 2 * sums[..., None], one.first, axis=1)
            attention = np.maximum.reduceat(heads, one.first, axis=1)
            attention = np.maximum(attention, self._from_other_nodes(one, kind))
            passes = np.maximum.reduceat(token + attention, one.begin, axis=1)
            again = passes
            if job.mode == "selective":
                again = np.maximum.reduceat(attention, one.begin, axis=1)
            count, repeated = np.reshape(held.layers, (-1, 1)), np.reshape(held.again, (-1, 1))
            stages = stages + count * passes.sum(axis=2) + repeated * again[..., 0]
            mean = mean + count[..., None] / job.stage_layers * passes
        logits = np.array([sum(logits_times(speeds, job, rows)) for speeds in self._speeds])
        logits = logits[device[-1], slots] + sums[-1]
        stages[-1] += np.maximum.reduceat(logits, one.first[one.begin])
        stages[:-1] += self._sends(one, rows)
        replicas = stages.sum(axis=0) + (one.micro_batches - 1) * stages.max(axis=0)
        replicas += self._shown(mean[..., 0], mean[..., 1]).max(axis=0)
        return self._step + np.maximum.reduceat(replicas, one.starts)

    def _attention(self, one: _Arrays, job: Job) -> Floats:
        """Seconds of one head in each group on each device, [D, 2, N], in layers of one kind."""
        if job.model.window is not None:
            return self._in_window(one, job, job.model.window.size)
        totals, number = np.unique(one.totals, return_inverse=True)
        outside, inside = one.beside((number[:, None] == np.arange(len(totals))).astype(float))
        sizes, fronts = totals.astype(float), np.floor(totals / 2)
        found = []
        for speeds in self._speeds:
            seconds = np.array(own_block_times(speeds, job, sizes, True))[:, number]
            # All queries see an outer group's front half; those of the back half see all of an inner group.
            for queries, keys, counts in ((sizes, fronts, outside), (sizes - fronts, sizes, inside)):
                blocks = np.array(rectangle_times(speeds, job, queries[:, None], keys))
                blocks += np.array(merge_times(speeds, job, queries[:, None]))
                blocks *= (queries[:, None] > 0) & (keys > 0)
                seconds += (counts * blocks[:, number]).sum(axis=2)
            found.append(seconds)
        return np.array(found)

    def _in_window(self, one: _Arrays, job: Job, window: int) -> Floats:
        """The same in a window."""
        totals = one.totals.astype(float)
        fastest = [replace(speeds, causal=_best_up_to(window, speeds)) for speeds in self._speeds]
        return np.array([own_block_times(speeds, job, totals, True) for speeds in fastest])

    def _from_other_nodes(self, one: _Arrays, kind: Job) -> Floats:
        """Seconds of what each group has to send to its own members on other nodes, or sees of groups there.

        A node's links carry what all of the group's members there send or receive, a GPU's what its own does.

        Returns:
            [S, N, 2].
        """
        job, workload = self._job, self._job.workload()
        place = np.arange(len(self._nodes))[:, None], one.group, self._nodes[:, one.units]
        tokens, heads, sent, used = np.zeros((4, len(self._nodes), len(one.totals), len(self._outside)))
        np.add.at(tokens, place, one.tokens)
        np.add.at(heads, place, one.heads)
        if self._per_gpu:
            np.maximum.at(sent, place, one.tokens)
            np.maximum.at(used, place, one.heads)
        else:
            sent, used = job.tensor_parallel * tokens, job.tensor_parallel * heads
        away, totals = heads == 0, one.totals[:, None]
        # The front half of outer groups, and all of inner ones.
        keys = used * (one.beside(away * (totals // 2.0))[0] + one.beside(away * (totals * 1.0))[1])
        if kind.model.window is not None:
            keys = np.zeros(keys.shape)
        rows = np.maximum(sent * (workload.local_heads - heads), used * (totals - tokens))
        element, query = job.micro_batch_size * job.element_bytes, job.model.head_dim
        # Keys and values of a query head; the gradients of keys and values are as many.
        part = (query + job.model.value_dim) / workload.queries_per_kv
        seconds = [np.maximum(times * part * keys, (query + part) * rows) / self._outside for times in (1, 2)]
        return element * np.stack(seconds, axis=-1).max(axis=2)

    def _sends(self, one: _Arrays, rows: Floats) -> Floats:
        """Seconds of each replica's rows to the next stage, and of their gradients back, [S - 1, R]."""
        by_unit = np.zeros((len(one.starts), len(self._fleet.units)))
        by_unit[one.candidate[one.replica][one.group], one.units] = rows
        distinct, number = np.unique(by_unit, axis=0, return_inverse=True)
        seconds = [
            [2 * pipeline_seconds(self._links, self._job, held, *ends) for ends in pairwise(self._gpus)]
            for held in distinct
        ]
        return np.array(seconds)[number][one.candidate].T

    def _shown(self, forward: Floats | float, backward: Floats | float) -> Floats:
        """Seconds that gradients and weights add to each stage, given those of a layer's passes."""
        layers, shown = self._job.stage_layers, np.zeros(1)
        for turn in self._turns:
            cover = {"forward": forward, "backward": backward, None: None}[turn.hides_behind]
            shown = shown + exposed_seconds(np.array(turn.seconds), layers, cover)
        return shown


def _best_up_to(size: float, speeds: Speeds) -> Passes:
    """At every size the best rates of both kinds of blocks up to this one."""
    ways = ((speeds.causal.forward, speeds.full.forward), (speeds.causal.backward, speeds.full.backward))
    return Passes(
        *(
            replace(both[0], sizes=(1.0,), rates=(max(curve.best_up_to(size) for curve in both),))
            for both in ways
        )
    )


def _numbered(counts: Sequence[int]) -> tuple[Ints, Ints]:
    """The number of each of so many that follow each other, and where those of each number begin."""
    return np.repeat(np.arange(len(counts)), counts), np.cumsum(counts) - counts


def _way_out(cluster: Cluster, node: int) -> float:
    """Bytes/s of a node's cards to other nodes (or of each GPU's); thinner links further up are left out."""
    if len(cluster.nodes) == 1:
        return np.inf
    if cluster.tiers:
        tier = cluster.tiers[0]
        links = {tier.link_of[rank] for rank in cluster.nodes[node].ranks}
        widths = [tier.bandwidths[link] for link in links]
        return widths[0] if tier.per == "gpu" else sum(widths)
    return max(cluster.capacity(LinkId(1, "node", node, way)) for way in ("out", "in"))
