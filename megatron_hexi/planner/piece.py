"""How many tokens a unit can hold at most, by the piece of a group that it belongs to: see bound.py."""

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
    rectangle_times,
    token_times,
)
from megatron_hexi.planner.filling import Filling
from megatron_hexi.planner.gradients import Limits
from megatron_hexi.planner.links import Links
from megatron_hexi.planner.room import Room

#: Where memory is full, what is held follows from what is attended to, and that from what is held.
_REFINED = 2
_NEARLY = 1e-9


class Pieces:
    """All pieces of groups that units of one kind on one site can be.

    Args:
        job: the job.
        speeds: of the kind.
        links: of a unit.
        size: units of the site.
        stage: pipeline stage.
        usable: bytes of a GPU's memory.
        shards: units that share the optimizer's state at most.
    """

    def __init__(
        self, job: Job, speeds: Speeds, links: Links, size: int, stage: int, usable: float, shards: int
    ) -> None:
        workload = job.workload()
        self._job, self._speeds, self._links, self._stage = job, speeds, links, stage
        # A rectangle may be smaller than taken here, and run faster where a curve falls.
        passes = Passes(_rising(speeds.full.forward), _rising(speeds.full.backward))
        self._best = replace(speeds, full=passes)
        self._all_heads, self._all_kv = workload.local_heads, workload.local_kv_heads
        self._ratio, self._causal = workload.queries_per_kv, workload.causal
        units, heads = np.meshgrid(np.arange(1, size + 1), np.arange(1, self._all_heads + 1), indexing="ij")
        keep = (heads == self._all_heads) | (links.outside > 0)
        self._units, self._heads = units[keep].astype(float), heads[keep].astype(float)
        # Of whole groups, the busiest member's heads.
        self._most_heads = np.ceil(self._heads / self._units)
        self._again = 1 if job.recompute == "none" else 2
        self._element = float(job.micro_batch_size * job.model.head_dim * job.element_bytes)
        self._size = size
        self._whole = job.seq_length * self.share
        self._filling = Filling()
        self._most_held = job.seq_length / self._units
        self._room = Room(job, stage, usable, shards)
        # Queries and outputs travel in halves at best, one of which is hidden on each way.
        columns = self._all_heads + 2 * self._all_kv
        #: Of a token's queries, keys, values and outputs: what shows, over all passes and all heads.
        self._token_bytes = (self._again + 1) * columns * self._element
        #: What a pass moves of them, shown or hidden, as a part of that.
        self._of_a_pass = (1 + self._all_heads / columns) / (self._again + 1)
        self._move_each, self._move_latency = self._all_to_all()
        self._move_seconds = self._token_bytes / links.outside if links.outside else 0.0

    @property
    def held_share(self) -> float:
        """Of the memory that a token takes, the part for holding it."""
        return self._room.held_share

    @property
    def share(self) -> Floats:
        """Of each piece: its part of its group's heads, a unit."""
        return self._heads / (self._all_heads * self._units)

    def most(self, limits: Limits, groups: int, depth: float, several: bool = False) -> tuple[Floats, Floats]:
        """Tokens that a unit of each piece holds at most, and tokens whose attention it does at most.

        The two are the same, but where memory has no room for so many tokens, and attention of other sites'
        tokens could be done instead; or where a piece with few heads has attended to all tokens, and could
        hold other sites'. Attention of a token means of all heads.

        Args:
            limits: of all passes of a layer.
            groups: of a domain, at least.
            depth: where the group's middle is among the nested ones, from 0, outermost, to 1, at most.
            several: whether there are several replicas, so that a site may have any number of units of one.
        """
        if limits.whole <= 0 or (limits.and_wire is not None and limits.and_wire <= 0):
            nothing = np.zeros(len(self._units))
            return nothing, nothing
        free = self._filling.last(
            "free", self._whole, lambda most: self._load(limits, most, most, groups, 0.0)
        )
        tokens = np.zeros(len(free))
        for least, most in _beside(self._size) if several else [(self._size, self._size)]:
            # A replica has a sequence: with so many units of it on a site, each holds its part at most.
            part = self._job.seq_length / least if several else np.inf
            done = np.minimum(self._exchanging(free, limits, groups, depth, most), part)
            tokens = np.maximum(tokens, done)
            if (tokens == free).all():
                break
        if not self._links.outside:
            held = np.minimum(tokens, self._room.together(groups))
            return held, held
        held = tokens
        # All tokens are attended to already by so few heads: what time is left is for holding other sites'.
        spare = (tokens >= self._whole) & (self._heads < self._all_heads)
        if spare.any():
            more = self._filling.last(
                "held", self._most_held, lambda most: self._load(limits, most, self._whole, groups, 0.0)
            )
            held = np.where(spare, np.maximum(more, tokens), tokens)
        short = held > self._room.held(tokens, groups)
        if not short.any():
            return held, tokens
        beside, attended = self._instead(limits, groups)
        return np.where(short, beside, held), np.where(short, attended, tokens)

    def _instead(self, limits: Limits, groups: int) -> tuple[Floats, Floats]:
        """Where memory is full: fewer tokens held, and as many attended to as there is time for then.

        What other sites' tokens bring has to come over the site's links. Memory leaves less room to hold
        tokens the more are attended to; those that it leaves room for at any rate take their time.
        """
        held = np.zeros(len(self._units))
        for _ in range(_REFINED):
            attended = self._filling.last(
                "attended",
                np.minimum(self._whole, self._room.attended_alone(groups)),
                lambda most, held=held: self._load(limits, held, most, groups, 0.0),  # type: ignore[misc]
            )
            held = np.maximum(0.0, self._room.held(attended, groups))
        return held, attended

    def holding(
        self, limits: Limits, groups: int, held: Floats, attended: Floats, price: float
    ) -> tuple[Floats, Floats]:
        """The same for whom holding tokens is worth more than attending to them: more held, fewer attended.

        Args:
            limits: as of `most`.
            groups: likewise.
            held: what `most` found.
            attended: likewise.
            price: of holding a token, as a part of its whole price, up to which this does not pay.
        """
        most = self._room.held_alone()
        full = held >= self._room.held(attended, groups) * (1 - _NEARLY)
        time_left = self._filling.last(
            "alone", self._most_held, lambda tokens: self._hold_load(limits, tokens)
        )
        more, fewer = hold_more(held, attended, price, np.maximum(held, np.minimum(time_left, most)))
        # Full memory has room for so many if they are not attended to.
        return np.where(full, most, more), np.where(full, 0.0, fewer)

    def _exchanging(self, free: Floats, limits: Limits, groups: int, depth: float, units: int) -> Floats:
        """Tokens at most with the exchange, where a site has so many units of a replica.

        The more tokens a piece and its site hold, the fewer keys are missing: what is missing at the most
        tokens that are possible without any exchange is missing at any smaller number.
        """
        wire = self._wire(free, units * float(free.max()), depth)
        if limits.and_wire is None:
            forward, backward = self._attention(free / self.share, groups)
            if (wire <= forward).all() and (2 * wire <= backward).all():
                return free
        return self._filling.last(
            "exchanging", free, lambda most: self._load(limits, most, most, groups, wire)
        )

    def _load(
        self, limits: Limits, tokens: Floats, attended: Floats, groups: int, wire: Floats | float
    ) -> Floats:
        """The part of the limits that a layer takes; grows with the tokens and with what is attended."""
        attention = self._attention(attended / self.share, groups)
        forward, backward = np.maximum(attention[0], wire), np.maximum(attention[1], 2 * wire)
        token = self._token_times(tokens)
        moved = self._move_each * tokens + self._move_latency
        beyond = np.maximum(attended - tokens, 0.0) * self._move_seconds
        again = 2 if self._job.recompute == "full" else 1
        whole = again * token.forward + token.backward + moved + beyond + self._again * forward + backward
        whole = whole + self._logits_seconds(tokens)
        load: Floats = whole / limits.whole
        if limits.and_wire is None:
            return load
        # The wire is taken to be free for as long as the pass is longer than what uses it.
        used = self._move_each * tokens * self._of_a_pass
        shown = moved / (self._again + 1)
        busy = np.minimum(used + 2 * wire, token.backward + shown + backward)
        if limits.forward:
            busy = busy + np.minimum(used + wire, token.forward + shown + forward)
        least, most = limits.wire
        load = np.maximum(load, busy / most)
        return np.maximum(load, (limits.turns * whole + np.maximum(busy, least)) / limits.and_wire)

    def _token_times(self, tokens: Floats) -> Times:
        """Both directions, with the sums inside a unit."""
        job, rows = self._job, self._job.micro_batch_size * tokens
        times = token_times(self._speeds, job, rows)
        if job.tensor_parallel == 1:
            return times
        bandwidth, latency = np.array(self._links.inside), np.array(self._links.inside_s)
        sums = 2 * tensor_parallel_seconds(job, rows, bandwidth, latency)
        return Times(times.forward + sums, times.backward + sums)

    def _logits_seconds(self, tokens: Floats) -> Floats | float:
        """The layer's part of the vocabulary, on the last stage."""
        job = self._job
        if self._stage < job.pipeline_parallel - 1:
            return 0.0
        logits = logits_times(self._speeds, job, job.micro_batch_size * tokens)
        return (logits.forward + logits.backward) / job.stage_layers

    def _attention(self, group: Floats, groups: int) -> tuple[Floats, Floats]:
        """Forward and backward pass of the busiest member: own block, rectangles, merging."""
        job, speeds = self._job, self._speeds
        others = np.maximum(job.seq_length - group, 0.0)
        own = own_block_times(speeds, job, group, self._causal)
        # Two groups' rectangles are q x k / 2 each way (without a mask q x k): no larger than all others' at
        # once.
        keys = others / 2 if self._causal else others
        far = rectangle_times(self._best, job, group, np.maximum(keys, 1e-9))
        # A step merges all of an inner group's queries, half of an outer one's; there is one step if any
        # other.
        steps = np.where(others > 0, max(groups - 1, 1), 0)
        merges = merge_times(speeds, job, group * steps * (0.5 if self._causal else 1.0))
        gradients = keys_merge_times(speeds, job, keys) / self._ratio
        forward = self._most_heads * (own.forward + far.forward + merges.forward)
        backward = self._most_heads * (own.backward + far.backward + merges.backward + gradients)
        return forward, backward

    def _all_to_all(self) -> tuple[Floats, Floats]:
        """Seconds a token and latency of what is not hidden, all passes.

        What is not of a unit's own heads leaves it; what is not of its site's, leaves the site. Query, key
        and value in, output back, and the same again in the backward pass: 2 H + 2 K a pass, of which H can
        hide: half of the queries on the way in, the other half of the outputs on the way back.
        """
        links, passes, volume = self._links, self._again + 1, self._token_bytes
        elsewhere = 1 - self._most_heads / self._all_heads
        abroad = 1 - self._heads / self._all_heads
        time = elsewhere * volume / np.where(abroad > 0, links.inside + links.outside, links.inside)
        latency = np.where(self._units > 1, links.inside_s, 0.0)
        if links.outside:
            sharing = self._units * self._job.tensor_parallel if links.shared else 1.0
            time = np.maximum(time, abroad * volume * sharing / links.outside)
            latency = np.where(abroad > 0, links.outside_s, latency)
        return time, 2 * passes * latency

    def _wire(self, tokens: Floats, site_tokens: float, depth: float) -> Floats:
        """One way of the exchange: keys and values of other groups, over all links and over the site's.

        A group sees half the keys of each one outside it and all of each one inside it: S (1 - depth / 2)
        less 3/4 of its own, and no less than half of all others'. What the site does not hold, whatever it
        holds at most, comes from outside.
        """
        job, links = self._job, self._links
        length, size = job.seq_length, 2 * self._all_kv * self._element
        part, group = self._heads / self._all_heads, tokens / self.share
        others = np.maximum(length - group, 0.0)
        half = 0.5 if self._causal else 1.0
        seen = np.maximum(others / 2, length * (1 - depth / 2) - 0.75 * group) if self._causal else others
        time: Floats = part * seen * size / self._units / (links.inside + links.outside)
        if links.outside:
            beside = site_tokens - part * group
            abroad = np.maximum(half * (part * length - site_tokens), part * seen - beside)
            lanes = 1 / job.tensor_parallel if links.shared else self._units
            time = np.maximum(time, np.maximum(abroad, 0.0) * size / (links.outside * lanes))
        return time

    def _hold_load(self, limits: Limits, tokens: Floats) -> Floats:
        """The part of the limits that it takes to hold tokens whose attention others do."""
        token = self._token_times(tokens)
        again = 2 if self._job.recompute == "full" else 1
        whole = again * token.forward + token.backward + self._move_each * tokens + self._move_latency
        load: Floats = (whole + self._logits_seconds(tokens)) / limits.whole
        return load


def hold_more(held: Floats, attended: Floats, price: float, most: Floats | float) -> tuple[Floats, Floats]:
    """Tokens held in place of tokens attended to, at the rate at which their prices make up for each other.

    Args:
        held: tokens.
        attended: tokens.
        price: of holding one, as a part of the price of both.
        most: that can be held.
    """
    worth = price * held + (1 - price) * attended
    more = np.minimum(worth / price, most)
    return more, np.maximum(0.0, worth - price * more) / (1 - price)


def _rising(curve: Curve) -> Curve:
    """The best rate at any size up to each."""
    return replace(curve, rates=tuple(itertools.accumulate(curve.rates, max)))


def _beside(size: int) -> list[tuple[int, int]]:
    """Units of a replica on a site, as intervals: one by one up to four, then doubling."""
    spans, first = [], 1
    while first <= size:
        last = min(size, first + max(0, first // 2 - 1))
        spans.append((first, last))
        first = last + 1
    return spans
