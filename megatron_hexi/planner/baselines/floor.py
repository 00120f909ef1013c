"""Lower bounds of layouts' iteration time and memory, so that most layouts need not be timed.

    group     >= its longest token work + the longest of its members' attention work, of the way of keys from
                 other nodes, and of an all-to-all to them                   in each pass
    stage     >= layers x (its slowest group in each pass) + longest logits + sends to the next stage
    replica   >= sum of its stages + (micro-batches - 1) x slowest stage + gradients and weights less a pass;
                 with chunks of stages of passes of a chunk
    iteration >= slowest replica + optimizer

Computing, tensor-parallel sums, sends, gradients, weights and the optimizer are those of cost/ at the
layout's own sizes, except the keys' gradients. Keys of groups without a member on a node cross that node's
links, in the backward pass their gradients too. Other messages, the smaller one of a pass's two all-to-alls,
and waits inside the exchange are left out. Jobs are causal, and layouts take all units of a fleet.

In a window a group's queries see as many keys as if its tokens were the sequence's first, or more, at the
best rates of blocks up to the window's size; keys of other groups take no time. If layers are of
several kinds, each kind is counted with its times. The exchange of columns before and behind
a scan, and the part of a scan that its groups of heads share, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_hexi.cluster import Cluster, LinkId, PassCurves
from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.collectives import loss_sum_seconds, pipeline_seconds, tensor_parallel_seconds
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
from megatron_hexi.cost.documents import cut_share
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.memory import GIB, Holdings, owned_params, part_memory, part_params
from megatron_hexi.cost.model_part import KindLayers, ModelPart
from megatron_hexi.cost.once import exposed_seconds
from megatron_hexi.cost.reductions import repeated_turns
from megatron_hexi.cost.rings import Rings
from megatron_hexi.cost.scan import scan_times
from megatron_hexi.mesh import Way
from megatron_hexi.models.job import Job
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Layout


class _Arrays(NamedTuple):
    """Layouts of several candidates, concatenated.

    Args:
        units: each member's unit, numbered in the fleet, [V].
        tokens: tokens of each member, [V].
        heads: heads of each member, [V].
        group: index of each member's group, [V].
        first: index of each group's first member, [N].
        totals: tokens of each group, [N].
        replica: index of each group's replica, [N].
        begin: index of each replica's first group, [R].
        micro_batches: micro-batches of each replica, [R].
        candidate: index of each replica's candidate, [R].
        starts: index of each candidate's first replica, [K].
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
        """Concatenate candidates, each with one layout a replica."""
        layouts = [layout for candidate_layouts in candidates for layout in candidate_layouts]
        parts = [part for layout in layouts for part in layout.parts]
        units, tokens, heads = (
            np.array([value for part in parts for value in getattr(part, name)])
            for name in ("units", "tokens", "heads")
        )
        group, first = _numbered([len(part.units) for part in parts])
        replica, begin = _numbered([len(layout.parts) for layout in layouts])
        candidate, starts = _numbered([len(candidate_layouts) for candidate_layouts in candidates])
        totals = np.add.reduceat(tokens, first)
        micro_batches = np.array([layout.micro_batches for layout in layouts])
        return cls(
            units, tokens, heads, group, first, totals, replica, begin, micro_batches, candidate, starts
        )

    def beside(self, values: Floats) -> tuple[Floats, Floats]:
        """Return for each group the sums over its replica's groups outside it, and inside it, [..., N, C]."""
        before = np.cumsum(values, axis=-2) - values
        outside = before - before[..., self.begin, :][..., self.replica, :]
        whole = np.add.reduceat(values, self.begin, axis=-2)[..., self.replica, :]
        return outside, whole - values - outside


class Floor:
    """Lower bounds for layouts of one fleet, many candidates at once.

    Args:
        fleet: the fleet whose units the layouts number.
        rings: the rings over units of the fleet's cluster.
        chunks: numbers of chunks a stage to bound each layout with.
    """

    def __init__(self, fleet: Fleet, rings: Rings, chunks: Sequence[int] = (1,)) -> None:
        self._chunks = list(chunks)
        #: The fleet with jobs of each number of chunks.
        self.fleets = [
            fleet if count == 1 else replace(fleet, job=replace(fleet.job, virtual_stages=count))
            for count in chunks
        ]
        self._fleet, self._job, self._links = fleet, fleet.job, rings.links
        job, cluster = fleet.job, fleet.cluster
        stages = np.arange(job.pipeline_parallel)
        #: First GPU of each unit on each stage, [S, units], and its node.
        self._gpus = np.array([[unit.gpus[stage][0] for unit in fleet.units] for stage in stages])
        self._nodes = self._links.nodes[self._gpus]
        behind = np.roll(self._gpus, -1, axis=0) if len(stages) > 1 else self._gpus
        self._borders = list(zip(self._gpus, behind, strict=True))
        devices = {id(device): device for kind in fleet.kinds for device in kind.devices}
        kinds = [[list(devices).index(id(device)) for device in kind.devices] for kind in fleet.kinds]
        #: Index of each unit's device on each stage, [S, units], in the lists below.
        self._device = np.array([kinds[unit.kind] for unit in fleet.units]).T
        self._speeds = [device_speeds(device, job) for device in devices.values()]
        self._copies = np.array([speeds.fp8_copies for speeds in self._speeds])
        self._usable = GIB * np.array([device.usable_gib for device in devices.values()])
        self._inside = np.array([(node.bandwidth, node.latency_s) for node in cluster.nodes]).T
        self._outside = np.array([_way_out(cluster, node) for node in range(len(cluster.nodes))])
        self._per_gpu = bool(cluster.tiers) and cluster.tiers[0].per == "gpu"
        order = sorted(range(len(fleet.units)), key=lambda unit: fleet.units[unit].gpus)
        held = [(ModelPart.of_job(job, stage), self._gpus[stage, order], 1) for stage in stages.tolist()]
        self._turns = repeated_turns(job, held, rings)
        params = np.asarray(part_params(job, ModelPart.of_job(job, stages)), dtype=float)
        owned = np.asarray(owned_params(job, params, len(fleet.units)))
        steps = np.array([optimizer_seconds(device, job, params, owned) for device in self._speeds])
        #: Seconds of all work at the best rates, and of the optimizer.
        self._work = job.global_batch_size * job.seq_length / fleet.ceiling_tokens_per_s
        self._step = float(steps[self._device, stages[:, None]].max())

    def least_s(self, replicas: int) -> float:
        """Return a lower bound of an iteration's seconds with this number of equal replicas, for any layout.

        The larger of two bounds: all work at the best rates, with pipelines that fill and drain; and the
        collectives of gradients and weights, which hide behind one micro-batch, plus all other micro-batches.
        """
        job, work = self._job, self._work
        micro_batches = job.global_batch_size / job.micro_batch_size
        passes = micro_batches * max(self._chunks)
        filled = work * (1 + (job.pipeline_parallel - 1) / passes) + self._shown(np.inf, np.inf).max()
        others = work * (1 - replicas / micro_batches) + self._shown(0.0, 0.0).max()
        return float(self._step + max(filled, others))

    def may_fit(self, candidates: Sequence[Sequence[Layout]]) -> Bools:
        """Return whether each candidate may fit in memory, without counting the keys in flight.

        Returns:
            [chunks, K].
        """
        arrays, nothing = _Arrays.of(candidates), np.zeros(1)
        held = Holdings(
            tokens=arrays.tokens.astype(float),
            group_tokens=arrays.totals[arrays.group].astype(float),
            heads=arrays.heads.astype(float),
            kv=arrays.heads / self._job.workload().queries_per_kv,
            micro_batches=arrays.micro_batches[arrays.replica][arrays.group],
            flights=Flights(nothing, nothing),
            fp8_copies=self._copies[self._device[:, arrays.units]],
        )
        rooms = []
        for fleet in self.fleets:
            part = ModelPart.of_job(fleet.job, np.arange(self._job.pipeline_parallel)[:, None])
            owned = owned_params(self._job, part_params(self._job, part), len(self._fleet.units))
            needed = sum(part_memory(self._job, part, held, 1, owned).values())
            fits = (needed <= self._usable[self._device[:, arrays.units]]).all(axis=0)
            rooms.append(np.logical_and.reduceat(fits, arrays.first[arrays.begin[arrays.starts]]))
        return np.array(rooms)

    def seconds(self, candidates: Sequence[Sequence[Layout]]) -> Floats:
        """Return a lower bound of the seconds of an iteration for each of K candidates.

        Args:
            candidates: layouts of each candidate, one for each replica.

        Returns:
            [chunks, K], a row for each number of chunks that is compared; infinite where Megatron cannot
            interleave the replicas' micro-batches.
        """
        job, arrays = self._job, _Arrays.of(candidates)
        rows = job.micro_batch_size * arrays.tokens.astype(float)
        device, slots = self._device[:, arrays.units], np.arange(len(rows))
        inside = self._inside[:, self._nodes[:, arrays.units]]
        sums = tensor_parallel_seconds(job, rows, inside[0], inside[1], self._copies[device] > 0)
        # Axes: stage; unit, group or replica; pass.
        part = ModelPart.of_job(job, np.arange(job.pipeline_parallel))
        mean = stages = np.zeros(1)
        for kind, held in zip(job.kinds, part.of_kinds(job.model), strict=True):
            token = np.array([token_times(speeds, kind, rows) for speeds in self._speeds])[device, :, slots]
            heads = arrays.heads[:, None] * self._attention(arrays, kind)[device, :, arrays.group]
            token = np.maximum.reduceat(token + len(kind.model.parts) * sums[..., None], arrays.first, axis=1)
            attention = np.maximum.reduceat(heads, arrays.first, axis=1)
            if kind.model.has_attention:
                attention = np.maximum(attention, self._from_other_nodes(arrays, kind))
            passes = np.maximum.reduceat(token + attention, arrays.begin, axis=1)
            again = passes
            if job.mode == "selective":
                again = np.maximum.reduceat(attention, arrays.begin, axis=1) * kind.model.has_attention
            count = KindLayers(*(np.reshape(layers, (-1, 1)) for layers in held))
            stages = stages + count.seconds(passes.sum(axis=2), again[..., 0])
            mean = mean + np.reshape(count.layers, (-1, 1, 1)) / job.stage_layers * passes
        logits = np.array([sum(logits_times(speeds, job, rows)) for speeds in self._speeds])
        logits = logits[device[-1], slots] + loss_sum_seconds(job, rows, *inside)[-1]
        stages[-1] += np.maximum.reduceat(logits, arrays.first[arrays.begin])
        sends, shown = self._sends(arrays, rows), self._shown(mean[..., 0], mean[..., 1]).max(axis=0)
        return np.array(
            [
                self._step
                + np.maximum.reduceat(self._through(chunks, stages, sends, arrays) + shown, arrays.starts)
                for chunks in self._chunks
            ]
        )

    def _through(self, chunks: int, stages: Floats, sends: Floats, arrays: _Arrays) -> Floats:
        """Return a lower bound of the seconds of each replica's micro-batches, [R].

        Args:
            stages: seconds of a micro-batch on each stage, [S, R].
            sends: seconds of sending its activations to the next stage, [S, R].
        """
        count = len(stages)
        if chunks == 1:
            times = stages + np.concatenate([2 * sends[:-1], np.zeros((1, sends.shape[1]))])
        else:  # Megatron waits for activations, and leaves gradients in flight.
            times = (
                stages / chunks + sends * np.where(np.arange(count) < count - 1, 1, 1 - 1 / chunks)[:, None]
            )
        seconds = times.sum(axis=0) + (chunks * arrays.micro_batches - 1) * times.max(axis=0)
        return np.where((arrays.micro_batches % count == 0) | (chunks == 1), seconds, np.inf)

    def _attention(self, arrays: _Arrays, job: Job) -> Floats:
        """Return the seconds of one head's attention in each group on each device, in layers of one kind.

        In layers with a state: of the scan instead, for the heads with a state that go with one of attention.

        Returns:
            [devices, forward and backward, groups].
        """
        if not job.model.has_attention:
            return self._scan(arrays, job)
        if job.model.window is not None:
            return self._in_window(arrays, job, job.model.window.size)
        totals, number = np.unique(arrays.totals, return_inverse=True)
        outside, inside = arrays.beside((number[:, None] == np.arange(len(totals))).astype(float))
        sizes, fronts = totals.astype(float), np.floor(totals / 2)
        seconds_by_device = []
        for speeds in self._speeds:
            seconds = np.array(own_block_times(speeds, job, sizes, True))[:, number]
            # All queries see an outer group's front half; those of the back half see all of an inner group.
            for queries, keys, counts in ((sizes, fronts, outside), (sizes - fronts, sizes, inside)):
                blocks = np.array(rectangle_times(speeds, job, queries[:, None], keys, sizes[:, None]))
                blocks += np.array(merge_times(speeds, job, (queries * cut_share(job, sizes))[:, None]))
                blocks *= (queries[:, None] > 0) & (keys > 0)
                seconds += (counts * blocks[:, number]).sum(axis=2)
            seconds_by_device.append(seconds)
        return np.array(seconds_by_device)

    def _scan(self, arrays: _Arrays, job: Job) -> Floats:
        """Return the seconds of the scan that goes with a head of attention (`_attention`); 0 for an MLP."""
        state, totals = job.model.state, arrays.totals.astype(float)
        if state is None:
            return np.zeros((len(self._speeds), 2, len(totals)))
        each = state.heads // job.model.heads
        return each * np.array([scan_times(speeds, job, totals)[0] for speeds in self._speeds])

    def _in_window(self, arrays: _Arrays, job: Job, window: int) -> Floats:
        """Return the seconds of one head's attention in a window, shaped as in `_attention`."""
        totals = arrays.totals.astype(float)
        fastest = [replace(speeds, causal=_best_up_to(window, speeds)) for speeds in self._speeds]
        return np.array([own_block_times(speeds, job, totals, True) for speeds in fastest])

    def _from_other_nodes(self, arrays: _Arrays, kind: Job) -> Floats:
        """Return a lower bound of the seconds of all-to-alls and key exchange between nodes, for each group.

        A node's links carry what all of the group's members on the node send or receive, a GPU's links what
        one member does.

        Returns:
            [layouts, groups, forward and backward].
        """
        job, workload = self._job, self._job.workload()
        place = np.arange(len(self._nodes))[:, None], arrays.group, self._nodes[:, arrays.units]
        tokens, heads, sent, used = np.zeros((4, len(self._nodes), len(arrays.totals), len(self._outside)))
        np.add.at(tokens, place, arrays.tokens)
        np.add.at(heads, place, arrays.heads)
        if self._per_gpu:
            np.maximum.at(sent, place, arrays.tokens)
            np.maximum.at(used, place, arrays.heads)
        else:
            sent, used = job.tensor_parallel * tokens, job.tensor_parallel * heads
        away, totals = heads == 0, arrays.totals[:, None]
        # The front half of outer groups, and all of inner ones.
        keys = used * (arrays.beside(away * (totals // 2.0))[0] + arrays.beside(away * (totals * 1.0))[1])
        keys = keys * (kind.model.window is None) * cut_share(job, totals)
        rows = np.maximum(sent * (workload.local_heads - heads), used * (totals - tokens))
        element, query = job.micro_batch_size * job.element_bytes, job.model.head_dim
        # Keys and values of a query head; the gradients of keys and values are as many.
        part = (query + job.model.value_dim) / workload.queries_per_kv
        seconds = [np.maximum(times * part * keys, (query + part) * rows) / self._outside for times in (1, 2)]
        return element * np.stack(seconds, axis=-1).max(axis=2)

    def _sends(self, arrays: _Arrays, rows: Floats) -> Floats:
        """Return the seconds of each stage's sends to the next one, of the last to the first, [S, R]."""
        by_unit = np.zeros((len(arrays.starts), len(self._fleet.units)))
        by_unit[arrays.candidate[arrays.replica][arrays.group], arrays.units] = rows
        distinct, number = np.unique(by_unit, axis=0, return_inverse=True)
        seconds = [
            [pipeline_seconds(self._links, self._job, held, *ends) for ends in self._borders]
            for held in distinct
        ]
        return np.array(seconds)[number][arrays.candidate].T

    def _shown(self, forward: Floats | float, backward: Floats | float) -> Floats:
        """Return the exposed seconds of gradient and weight collectives on each stage."""
        turns = ((np.array(turn.seconds), turn.hides_behind) for turn in self._turns)
        cover: dict[Way, Floats | float] = {"forward": forward, "backward": backward}
        return np.zeros(1) + exposed_seconds(turns, self._job.stage_layers, cover.__getitem__)


def _best_up_to(size: float, speeds: Speeds) -> PassCurves:
    """Return rates that hold for every size: the best of causal and full blocks up to this size."""
    ways = ((speeds.causal.forward, speeds.full.forward), (speeds.causal.backward, speeds.full.backward))
    return PassCurves(
        *(
            replace(both[0], sizes=(1.0,), rates=(max(curve.best_up_to(size) for curve in both),))
            for both in ways
        )
    )


def _numbered(counts: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the run number of each element of runs of these lengths, and the index where each run starts."""
    return np.repeat(np.arange(len(counts)), counts), np.cumsum(counts) - counts


def _way_out(cluster: Cluster, node: int) -> float:
    """Return the bandwidth of a node's own links out (or each GPU's), bytes/s, without links beyond them."""
    if len(cluster.nodes) == 1:
        return np.inf
    if cluster.tiers:
        tier = cluster.tiers[0]
        links = {tier.link_of[rank] for rank in cluster.nodes[node].ranks}
        widths = [tier.bandwidths[link] for link in links]
        return widths[0] if tier.per == "gpu" else sum(widths)
    return max(cluster.capacity(LinkId(1, "node", node, way)) for way in ("out", "in"))
