"""The best plan for a handful of GPUs by trying everything, with code that the planner does not share.

Tried are all partitions of all subsets of the GPUs into groups, and in each group all ways to deal the heads.
What is left, tokens, order and window, is found by a pattern search. Every plan is timed by `CostModel`. GPUs
of a node are exchanged freely. Nothing is passed over but what no tokens whatever can make better than what
is known already (`_layers`): worked out by hand from what the cost model assumes, loose but certain.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from megatron_hexi.cost import CostModel, attention_seconds, token_seconds
from megatron_hexi.cost.compute import device_speeds, optimizer_seconds
from megatron_hexi.cost.memory import GRADIENT_BYTES
from megatron_hexi.plan import Domain, Exchange, Group, Member, Plan, Replica, Stage, unit_ranks
from megatron_hexi.plan.layout import apportion, causal_segments, consecutive
from tests.support.costs import stage_params

#: Factors by which the pattern search changes shares, and how far from the best one may be after each.
_STEPS = ((1.5, 1.25), (1.15, 1.06), (1.04, 1.015), (1.01, 1.0))
#: A memory overdrawn by a hundredth counts as so many hundredths of time.
_OVERDRAWN = 10


class BruteForce:
    """The search on one cluster, for one replica, without tensor and pipeline parallelism.

    Args:
        job: the job.
        cluster: where it runs.
        known_s: an iteration that has to be beaten.
        budget: plans to time at most.
    """

    def __init__(self, job, cluster, known_s=math.inf, budget=math.inf):
        self._job, self._cluster = job, cluster
        self._model = CostModel(job, cluster)
        self._budget = budget
        self._nodes = [rank.node for rank in cluster.ranks]
        speeds = [device_speeds(rank.device, job) for rank in cluster.ranks]
        # Seconds of all tokens one by one, at best rates: outside attention, and in one head of it.
        tokens = job.seq_length * job.global_batch_size
        self._token = [tokens * token_seconds(one, job) for one in speeds]
        self._head = [tokens * attention_seconds(one, job, causal=True) / job.model.heads for one in speeds]
        self._speeds = speeds
        passes = 2 if job.recompute == "none" else 3
        #: Bytes of an iteration for one column (one head's query, key, value or output) of all tokens.
        self._column = passes * tokens * job.model.head_dim * job.element_bytes * job.model.layers
        self._limit = known_s
        self._finished: dict[tuple[int, ...], float] = {}
        self.best = None
        self.timed = 0
        #: Whether nothing that could have been better is left.
        self.complete = True

    def run(self):
        """(seconds, plan) of the best found, ``None`` if there is nothing better than what is known."""
        candidates = sorted(self._candidates(), key=lambda candidate: candidate[0])
        scanned = []
        for least, groups in candidates:
            if least < self._limit and self._may_time(self._budget / 2):
                shares = self._first_shares(groups)
                scanned.append((self._time(groups, shares, falling(shares), 2), least, groups, shares))
        for seconds, least, groups, shares in sorted(scanned, key=lambda found: found[:2]):
            if least < self._limit and self._may_time(self._budget):
                self._search(groups, shares, seconds)
        return self.best

    def _may_time(self, budget):
        """Whether there is any budget left; else something may be missed."""
        self.complete &= self.timed < budget
        return self.timed < budget

    # What there is to try, and what it takes at least.

    def _candidates(self):
        seen = set()
        everything = range(len(self._nodes))
        for size in range(1, len(everything) + 1):
            for chosen in itertools.combinations(everything, size):
                for partition in partitions(chosen):
                    name = tuple(sorted(tuple(self._nodes[gpu] for gpu in group) for group in partition))
                    if name not in seen:
                        seen.add(name)
                        yield from self._with_heads(partition)

    def _with_heads(self, partition):
        after = self._after_layers(tuple(sorted(gpu for group in partition for gpu in group)))
        options = [
            [(dealt, self._rates(group, dealt)) for dealt in self._deals(group)] for group in partition
        ]
        for choice in itertools.product(*options):
            least = after + self._layers(tuple(rates for _, rates in choice))
            if least < self._limit:
                yield (
                    least,
                    [
                        tuple(zip(group, dealt, strict=True))
                        for group, (dealt, _) in zip(partition, choice, strict=True)
                    ],
                )

    def _deals(self, group):
        """All ways to deal the heads, up to exchanging GPUs of a node."""
        for dealt in compositions(self._job.model.heads, len(group)):
            pairs = itertools.pairwise(
                (self._nodes[gpu], heads) for gpu, heads in zip(group, dealt, strict=True)
            )
            if all(a[0] != b[0] or a[1] >= b[1] for a, b in pairs):
                yield dealt

    def _rates(self, group, dealt):
        """What bounds a group that holds the part g of the tokens, in seconds: g x work, and g x outside +
        (1 - g) x keys. A member with the part t of the tokens: t x (token + all-to-alls) + g x attention."""
        model = self._job.model
        speed = width = 0.0
        for gpu, heads in zip(group, dealt, strict=True):
            move = 0.0
            if len(group) > 1:
                columns = 2 * (model.heads - heads) * (1 + model.kv_heads / model.heads)
                move = columns * self._column / self._width(gpu, group)
            speed += 1 / (self._token[gpu] + move)
            width += self._width(gpu, range(len(self._nodes)))
        attention = max(heads * self._head[gpu] for gpu, heads in zip(group, dealt, strict=True))
        # Half of all other keys and values come in with each pass; in the backward one their gradients leave.
        passes = {"none": 3 / 2, "selective": 4 / 3, "full": 4 / 3}[self._job.recompute]
        keys = passes * model.kv_heads * self._column / width if width else 0.0
        return 1 / speed, attention, keys

    def _width(self, gpu, others):
        """Bytes/s in one direction between a GPU and others, over all links at once."""
        here = self._nodes[gpu]
        inside = any(self._nodes[other] == here for other in others if other != gpu)
        far = [self._cluster.bandwidth(gpu, other) for other in others if self._nodes[other] != here]
        matrix = self._cluster.file.matrix is not None
        outside = (sum if matrix else max)(far) if far else 0.0
        return outside + (self._cluster.nodes[here].bandwidth if inside else 0.0)

    def _layers(self, groups):
        """The least time in which the groups' parts add up to 1."""
        low = 1 / sum(1 / (outside + attention) for outside, attention, _ in groups)
        if len(groups) == 1:
            return low
        high = max(sum(rates) for rates in groups)
        if self._parts(groups, low) >= 1:
            return low
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._parts(groups, middle) >= 1 else (middle, high)
            if low >= self._limit:
                break
        return low

    def _parts(self, groups, seconds):
        total = 0.0
        for outside, attention, keys in groups:
            most, slope = min(1.0, seconds / (outside + attention)), outside - keys
            if slope > 0:
                most = min(most, (seconds - keys) / slope)
            elif most * slope + keys > seconds:
                most = 0.0
            # Groups hold whole tokens, and a half of an odd number may be one less.
            total += max(0.0, most) + 2 * len(groups) / self._job.seq_length
        return total

    def _after_layers(self, chosen):
        """Seconds of the optimizer, and of gradients and weights as far as nothing can hide them."""
        if chosen not in self._finished:
            job, params, count = self._job, stage_params(self._job, 0), len(chosen)
            gradients = params * GRADIENT_BYTES[job.precision]
            sizes = [gradients, params * job.element_bytes if job.distributed_optimizer else gradients]
            ring = sum(self._model.rings.seconds(np.array(chosen), float(size), 1) for size in sizes)
            shard = params / count if job.distributed_optimizer else float(params)
            step = max(optimizer_seconds(self._speeds[gpu], job, params, shard) for gpu in chosen)
            self._finished[chosen] = step + (ring / job.model.layers if job.overlap_gradients else ring)
        return self._finished[chosen]

    # How one candidate is laid out best.

    def _search(self, groups, shares, seconds):
        """From the first shares on, the outermost group the largest or the smallest."""
        order = falling(shares)
        if len(groups) > 1:
            back = self._time(groups, shares, order[::-1], 2)
            seconds, order = min((seconds, order), (back, order[::-1]))
        changes = list(_changes(groups))
        for step, near in _STEPS:
            improved = True
            while improved and self.timed < self._budget:
                improved = False
                for change, factor in itertools.product(changes, (step, 1 / step)):
                    other = change(shares, factor)
                    found = self._time(groups, other, order, 2)
                    if found < seconds * (1 - 1e-4):
                        seconds, shares, improved = found, other, True
            if seconds > near * self._limit:
                return
        if len(groups) > 1:
            for window in (1, 3):
                self._time(groups, shares, order, window)
            self._time(groups, shares, order[::-1], 2)

    def _first_shares(self, groups):
        """Tokens of each member by the same reckoning as `_rates`."""
        shares = []
        for group in groups:
            gpus = [gpu for gpu, _ in group]
            outside, attention, _ = self._rates(gpus, [heads for _, heads in group])
            rates = [1 / self._token[gpu] for gpu in gpus]
            shares.append([rate / sum(rates) / (outside + attention) for rate in rates])
        return shares

    def _time(self, groups, shares, order, window):
        """Seconds of an iteration; more where memory is overdrawn."""
        plan = plan_of(self._job, groups, shares, order, window, len(self._nodes))
        timing = self._model.timing(plan)
        self.timed += 1
        seconds = timing.phases.total
        excess = timing.fullness - 1
        if excess > 0:
            return seconds * (1 + _OVERDRAWN * excess)
        if seconds < self._limit:
            self._limit, self.best = seconds, (seconds, plan)
        return seconds


def plan_of(job, groups, shares, order, window, gpus):
    """A plan from each group's (GPU, heads) and token shares.

    Args:
        job: the job.
        groups: (GPU, heads) of each member.
        shares: in proportion to which members hold tokens.
        order: of the groups, the outermost first.
        window: of the exchange.
        gpus: of the cluster.
    """
    used = sorted(gpu for group in groups for gpu, _ in group)
    rank = {gpu: number for number, gpu in enumerate(used)}
    totals = apportion(job.seq_length, [sum(shares[group]) for group in order])
    built = []
    for number, total, segments in zip(order, totals, causal_segments(totals), strict=True):
        members = sorted(zip(groups[number], apportion(total, shares[number]), strict=True))
        heads = consecutive(count for (_, count), _ in members)
        held = (
            Member(unit_ranks(job.workload(), rank[gpu]), tokens, span)
            for ((gpu, _), tokens), span in zip(members, heads, strict=True)
        )
        built.append(Group(segments, tuple(held)))
    replica = Replica((Stage((Domain(tuple(built)),)),))
    return Plan(job.workload(), (replica,), Exchange(window), gpus=None if len(used) == gpus else tuple(used))


def falling(shares):
    """The largest group first."""
    return tuple(sorted(range(len(shares)), key=lambda group: -sum(shares[group])))


def partitions(items):
    """All partitions into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for number, group in enumerate(rest):
            yield [*rest[:number], [items[0], *group], *rest[number + 1 :]]


def compositions(total, parts):
    """All ways to write `total` as so many whole numbers, 0 included."""
    for cuts in itertools.combinations(range(total + parts - 1), parts - 1):
        ends = (-1, *cuts, total + parts - 1)
        yield tuple(stop - start - 1 for start, stop in itertools.pairwise(ends))


def _changes(groups):
    """More or fewer tokens for one group, or for one member."""
    places: list[tuple[int, int | None]] = (
        [(number, None) for number in range(len(groups))] if len(groups) > 1 else []
    )
    places += [
        (number, member)
        for number, group in enumerate(groups)
        if len(group) > 1
        for member in range(len(group))
    ]
    for group, member in places:
        yield lambda shares, factor, group=group, member=member: [
            [
                share * factor if number == group and member in (None, place) else share
                for place, share in enumerate(held)
            ]
            for number, held in enumerate(shares)
        ]
