"""How much of its time a piece of a group takes for its tokens: see bound.py."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from megatron_hexi.cluster import Curve, Passes
from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.collectives import tensor_parallel_seconds
from megatron_hexi.cost.compute import (
    Speeds,
    Times,
    keys_merge_times,
    logits_times,
    merge_times,
    own_block_times,
    rates,
    rectangle_times,
    token_times,
)
from megatron_hexi.planner.bound.pieces.gradients import Limits
from megatron_hexi.planner.fleet.links import Links


class Load:
    """What all pieces of groups take on a pipeline stage that units of one kind on one site can be.

    Args:
        job: the job.
        speeds: of the kind.
        links: of a unit.
        size: units of the site.
        stage: pipeline stage.
    """

    def __init__(self, job: Job, speeds: Speeds, links: Links, size: int, stage: int) -> None:
        workload = job.workload()
        self._job, self._speeds, self.links, self._stage = job, speeds, links, stage
        # A rectangle may be smaller than taken here, and run faster where a curve falls.
        passes = Passes(_rising(speeds.full.forward), _rising(speeds.full.backward))
        self._best = replace(speeds, full=passes)
        self._all_heads, self._all_kv = workload.local_heads, workload.local_kv_heads
        self.ratio, self._causal = workload.queries_per_kv, workload.causal
        #: Part of an inner group's queries or an outer group's keys that see each other, each way.
        self.shown = 0.5 if self._causal else 1.0
        #: Whether groups may be on several sites.
        self.crosses = links.outside > 0
        units, heads = np.meshgrid(np.arange(1, size + 1), np.arange(1, self._all_heads + 1), indexing="ij")
        keep = (heads == self._all_heads) | self.crosses
        #: Units of each piece, and heads of all of them.
        self.units, self.heads = units[keep].astype(float), heads[keep].astype(float)
        #: Its part of its group's heads, a unit.
        self.share = self.heads / (self._all_heads * self.units)
        # Of whole groups, the busiest member's heads.
        self._most_heads = np.ceil(self.heads / self.units)
        self.again = 1 if job.recompute == "none" else 2
        self._element = float(job.micro_batch_size * job.model.head_dim * job.element_bytes)
        # Queries and outputs travel in halves at best, one of which is hidden on each way.
        columns = self._all_heads + 2 * self._all_kv
        #: Of a token's queries, keys, values and outputs: what shows, over all passes and all heads.
        self.token_bytes = (self.again + 1) * columns * self._element
        #: What a pass moves of them, shown or hidden, as a part of that.
        self._of_a_pass = (1 + self._all_heads / columns) / (self.again + 1)
        #: Of a token's keys and values of all heads.
        self.key_bytes = 2 * self._all_kv * self._element
        #: The same as `token_bytes` where nothing travels in halves.
        self.whole_token_bytes = self.token_bytes * (1 + self._all_heads / columns)
        self._move_each, self._move_latency = self._all_to_all()
        self._move_seconds = self.token_bytes / links.outside if links.outside else 0.0

    def part(
        self,
        limits: Limits,
        tokens: Floats,
        attended: Floats,
        groups: int,
        depth: float,
        wire: Floats | float,
    ) -> Floats:
        """The part of the limits that a layer takes; grows with the tokens and with what is attended."""
        attention = self.attention(attended / self.share, groups, depth)
        forward, backward = np.maximum(attention[0], wire), np.maximum(attention[1], 2 * wire)
        reached = rates(self._speeds.matmul, self._job.micro_batch_size * tokens)
        token = self.pass_seconds(tokens, reached)
        moved = self._move_each * tokens + self._move_latency
        beyond = np.maximum(attended - tokens, 0.0) * self._move_seconds
        whole = self._passes(token, tokens, reached) + moved + beyond + self.again * forward + backward
        load: Floats = whole / limits.whole
        if limits.and_wire is None:
            return load
        # The wire is taken to be free for as long as the pass is longer than what uses it.
        used = self._move_each * tokens * self._of_a_pass
        shown = moved / (self.again + 1)
        busy = np.minimum(used + 2 * wire, token.backward + shown + backward)
        if limits.forward:
            busy = busy + np.minimum(used + wire, token.forward + shown + forward)
        least, most = limits.wire
        load = np.maximum(load, busy / most)
        return np.maximum(load, (limits.turns * whole + np.maximum(busy, least)) / limits.and_wire)

    def holding_part(self, limits: Limits, tokens: Floats) -> Floats:
        """The part of the limits that it takes to hold tokens whose attention others do."""
        whole = self.token_seconds(tokens) + self._move_each * tokens + self._move_latency
        load: Floats = whole / limits.whole
        return load

    def token_seconds(self, tokens: Floats, way: int | None = None) -> Floats:
        """Token work of all passes of a layer, with its part of the vocabulary; or of a way: 0 or 1."""
        token = self.pass_seconds(tokens)
        return self._passes(token, tokens) if way is None else token[way]

    def often(self, way: int | None = None) -> tuple[int, int]:
        """How often attention goes forward and backward in all passes of a layer; or in one of a way."""
        return (self.again, 1) if way is None else (1 - way, way)

    def _passes(self, token: Times, tokens: Floats, reached: Floats | None = None) -> Floats:
        again = 2 if self._job.recompute == "full" else 1
        whole: Floats = again * token.forward + token.backward + self.logits_seconds(tokens, reached)
        return whole

    def pass_seconds(self, tokens: Floats, reached: Floats | None = None) -> Times:
        """Token work of a forward and of a backward pass, with the sums inside a unit.

        `reached` as of `token_times`.
        """
        job, rows = self._job, self._job.micro_batch_size * tokens
        times = token_times(self._speeds, job, rows, reached)
        if job.tensor_parallel == 1:
            return times
        bandwidth, latency = np.array(self.links.inside), np.array(self.links.inside_s)
        sums = 2 * tensor_parallel_seconds(job, rows, bandwidth, latency)
        return Times(times.forward + sums, times.backward + sums)

    def logits_seconds(self, tokens: Floats, reached: Floats | None = None) -> Floats | float:
        """The layer's part of the vocabulary, on the last stage; `reached` as of `logits_times`."""
        job = self._job
        if self._stage < job.pipeline_parallel - 1:
            return 0.0
        logits = logits_times(self._speeds, job, job.micro_batch_size * tokens, reached)
        return (logits.forward + logits.backward) / job.stage_layers

    def attention(self, group: Floats, groups: int, depth: float) -> tuple[Floats, Floats]:
        """Forward and backward pass of the busiest member."""
        own, far = self.head_times(group, groups, depth)
        forward, backward = (self._most_heads * (a + b) for a, b in zip(own, far, strict=True))
        return forward, backward

    def head_times(
        self, group: Floats, groups: int, depth: Floats | float = 1.0, met: float | None = None
    ) -> tuple[Times, Times]:
        """One head: the group's own block, and rectangles with merging.

        Args:
            group: tokens of groups.
            groups: how many there are at least.
            depth: where their middle is among the nested ones at most.
            met: how many of the others they merge all of their queries with at least, those of half of them
                counting half; ``None``: what follows from their number.
        """
        job, speeds = self._job, self._speeds
        others = np.maximum(job.seq_length - group, 0.0)
        own = own_block_times(speeds, job, group, self._causal)
        # Two groups' rectangles are q x k / 2 each way (without a mask q x k): no larger than all others' at
        # once.
        keys = others / 2 if self._causal else others
        far = rectangle_times(self._best, job, group, np.maximum(keys, 1e-9))
        merges = self.merges(group, groups, met)
        gradients = keys_merge_times(speeds, job, self.keys_seen(group, depth)) / self.ratio
        return own, Times(far.forward + merges.forward, far.backward + merges.backward + gradients)

    def merges(self, group: Floats, groups: int, met: float | None = None) -> Times:
        """What merging takes in all steps, of one head; arguments as of `head_times`."""
        # A step merges all of an inner group's queries, half of an outer one's; there is a step if there is
        # another group.
        often = max(groups - 1, 1) * self.shown if met is None else met
        queries = np.where(self._job.seq_length > group, group * often, 0.0)
        return merge_times(self._speeds, self._job, queries)

    def a_merge(self, way: int) -> tuple[float, float]:
        """One head's merging, forward (0) or backward (1): seconds for a query in a step, and for a key.

        `head_times` has the least of it: half of all tokens in each step.
        """
        one = np.ones(1)
        queries = merge_times(self._speeds, self._job, one)[way]
        keys = keys_merge_times(self._speeds, self._job, one) / self.ratio if way else np.zeros(1)
        return float(queries[0]), float(keys[0])

    def _all_to_all(self) -> tuple[Floats, Floats]:
        """Seconds a token and latency of what is not hidden, all passes.

        What is not of a unit's own heads leaves it; what is not of its site's, leaves the site. Query, key
        and value in, output back, and the same again in the backward pass: 2 H + 2 K a pass, of which H can
        hide: half of the queries on the way in, the other half of the outputs on the way back.
        """
        links, passes, volume = self.links, self.again + 1, self.token_bytes
        elsewhere = 1 - self._most_heads / self._all_heads
        abroad = 1 - self.heads / self._all_heads
        time = elsewhere * volume / np.where(abroad > 0, links.inside + links.outside, links.inside)
        latency = np.where(self.units > 1, links.inside_s, 0.0)
        if links.outside:
            sharing = self.units * self._job.tensor_parallel if links.shared else 1.0
            time = np.maximum(time, abroad * volume * sharing / links.outside)
            latency = np.where(abroad > 0, links.outside_s, latency)
        return time, 2 * passes * latency

    def wire(self, tokens: Floats, site_tokens: float, depth: float) -> Floats:
        """One way of the exchange: keys and values of other groups, over all links and over the site's.

        What the site does not hold, whatever it holds at most, comes from outside.
        """
        length = self._job.seq_length
        half = 0.5 if self._causal else 1.0
        part, group = self.heads / self._all_heads, tokens / self.share
        seen = part * self.keys_seen(group, depth)
        beside = site_tokens - part * group
        abroad = np.maximum(half * (part * length - site_tokens), seen - beside)
        return self.wire_seconds(self.units, seen, np.maximum(abroad, 0.0))

    def moving(self, units: int, outside: bool, in_halves: bool) -> tuple[float, float]:
        """All-to-alls of all passes, which are alike: seconds a token, and latency.

        Args:
            units: that send or receive it together.
            outside: to or from other sites, or else inside the site.
            in_halves: whether one half of the queries hides.
        """
        links = self.links
        lanes = (1 / self._job.tensor_parallel if links.shared else units) if outside else units
        bandwidth = links.outside if outside else links.inside
        size = self.token_bytes if in_halves else self.whole_token_bytes
        latency = links.outside_s if outside else links.inside_s
        return size / (bandwidth * lanes), 2 * (self.again + 1) * latency

    def is_like(self, other: Load) -> bool:
        """Whether a layer takes the same on another stage."""
        return self.links == other.links and self._speeds == other._speeds

    def wire_seconds(self, units: Floats | int, seen: Floats, abroad: Floats) -> Floats:
        """One way of the exchange, for keys and values of all heads.

        Args:
            units: of a site, that share the work.
            seen: tokens whose keys they need.
            abroad: those of them that come from other sites.
        """
        links, size = self.links, self.key_bytes
        time: Floats = seen * size / units / (links.inside + links.outside)
        if links.outside:
            lanes = 1 / self._job.tensor_parallel if links.shared else units
            time = np.maximum(time, abroad * size / (links.outside * lanes))
        return time

    def keys_seen(self, group: Floats, depth: Floats | float) -> Floats:
        """Tokens of other groups whose keys a group needs.

        Half of each one outside it and all of each one inside it: S (1 - depth / 2) less 3/4 of its own, and
        no less than half of all others'.
        """
        length = self._job.seq_length
        others = np.maximum(length - group, 0.0)
        if not self._causal:
            return others
        seen: Floats = np.maximum(others / 2, length * (1 - depth / 2) - 0.75 * group)
        return seen


def _rising(curve: Curve) -> Curve:
    """The best rate at any size up to each."""
    return replace(curve, rates=tuple(itertools.accumulate(curve.rates, max)))
