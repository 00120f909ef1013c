"""A time that no plan can beat: a bound over all groupings, shards, heads and replicas, with communication.

Take any plan, and let all passes of a layer take tau seconds. A *piece* is what one group has on one site: n
units that hold n t of the group's tokens and h of its H heads. Whatever else the plan does, a piece needs

    token work of t tokens a unit
  + all-to-alls: a unit's tokens times the heads that it does not have itself, over its links
  + for each pass the longer of
      attention: ceil(h / n) heads of the group's tokens: own block, rectangles, merging (gradients of as
        many keys as the group sees: the fewer, the deeper it is)
      exchange: at least half the keys of tokens that are not its group's, over the links that they cross

and that is at most tau. So a unit in such a piece holds `Pieces.most` at most. The pieces of a group have all
of its heads: h / H adds up to 1 over them, and to the number of groups N over all. So a plan with N
groups needs units that each pick a piece (n, h), with h / (H n) adding up to N, and hold the whole sequence.
Everything else is relaxed; the sum is bounded by Lagrangian duality with one multiplier for N, and tau
found by branch and bound over N (demand.py).

The optimizer's step comes after all that. Gradients and weights go round in rings that hide behind the last
backward and the first forward pass, in the time that these leave the wire free. All units wait for the
busiest wire, so plans are told apart by what uses it most: no unit's all-to-alls and keys take more than
that, and every unit waits for a ring that hides in the rest only. In a pipeline all stages repeat a layout:
a unit's time is that of all its stages, the slowest of them in all micro-batches, and the wire is free for
the ring.

Shards are laid out as the nested zigzag, so a group's attention area is its tokens x S / 2. A piece holds the
same part of its group's tokens as of its heads: one that does not must send the difference over its
site's links, which does not pay at the prices of holding a token and of its attention that prices.py finds.
Where memory is full, it may: then it holds as many as there is room for beside those that it attends to
(room.py), and the price of holding goes up to what a token takes of memory.

Where units can form few shapes of groups, whole groups are looked at besides (packing.py); of several
replicas, where these can have few shapes, each by itself (replicas.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.planner.bound.packings.packing import Packing, packable
from megatron_hexi.planner.bound.pieces.demand import Box, Demand
from megatron_hexi.planner.bound.pieces.gradients import least_ring
from megatron_hexi.planner.bound.pieces.prices import Prices, token_prices
from megatron_hexi.planner.bound.replica_choices import ReplicaChoices, replica_shapes
from megatron_hexi.planner.bound.site_classes import classes_of, sites_of
from megatron_hexi.planner.budget import Proof
from megatron_hexi.planner.fleet.choose import single_sites
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Grouping

#: A bound that is so close to what was found is not looked at again.
_CLOSE = 0.01
#: Up to so many micro-batches of a replica are looked at one by one; beyond, communication is left out.
_TURNS = 32


@dataclass(frozen=True)
class Bound:
    """A lower bound of the iteration time over all plans.

    Args:
        iteration_s: seconds.
        reason: what it counts, one sentence for people.
    """

    iteration_s: float
    reason: str


class LowerBound:
    """The bound over all plans on all or some of the units.

    Plans on one site need no network; all others wait for gradients that cross it. Where replicas are free,
    one that takes all micro-batches is looked at by itself: its groups are bounded more closely.

    Args:
        fleet: the units.
        data_parallel: replicas, equal; ``None``: as many as a plan likes.
        found_s: an iteration that is known to be possible; the bound need not be higher.
        proof: what it may take.
    """

    def __init__(self, fleet: Fleet, data_parallel: int | None, found_s: float, proof: Proof) -> None:
        several = len(fleet.sites) > 1
        parts = [(fleet, several), *((site, False) for site in single_sites(fleet) if several)]
        free = data_parallel is None and _together(fleet.job) > 1
        self._cases = [
            _Case(part, replicas, found_s, crosses, proof)
            for part, crosses in parts
            for replicas in ((1, None) if free else (data_parallel or 1,))
        ]

    def roughly(self) -> Bound:
        """By pieces and by fractions of groups."""
        return min((case.rough for case in self._cases), key=_seconds)

    def groupings(self) -> tuple[Grouping, ...]:
        """Of all units as one replica: those that it does not rule out to be fast, where these are few."""
        return self._cases[0].groupings()

    def closely(self, found_s: float) -> Bound:
        """By whole groups besides, where units can form few shapes of them: that takes longer.

        Args:
            found_s: an iteration that is known to be possible by now; the bound need not be higher.
        """
        first, *others = sorted(self._cases, key=lambda case: case.rough.iteration_s)
        least = first.closely(found_s)
        for case in others:
            # What is no lower than that does not count.
            if case.rough.iteration_s < least.iteration_s:
                least = min(least, case.closely(least.iteration_s), key=_seconds)
        return least


def _seconds(bound: Bound) -> float:
    return bound.iteration_s


class _Case:
    """The bound over plans that keep to the fleet, and cross its sites or do not.

    Args:
        fleet: the units.
        data_parallel: replicas, equal; ``None``: two or more.
        found_s: an iteration that is known to be possible.
        crosses: whether plans cross sites.
        proof: what it may take.
    """

    def __init__(
        self, fleet: Fleet, data_parallel: int | None, found_s: float, crosses: bool, proof: Proof
    ) -> None:
        job = fleet.job
        together = _together(job)
        turns = together // data_parallel if data_parallel else 1
        ring = least_ring(fleet, found_s, crosses)
        #: Of all replicas together, and of each by itself.
        self._packing: Packing | None = None
        self._replicas: ReplicaChoices | None = None
        self._data_parallel, self._found_s, self._aims = data_parallel, found_s, proof.aims

        plain_s = job.global_batch_size * job.seq_length / fleet.ceiling_tokens_per_s
        plain = Bound(min(found_s, plain_s + ring.wait_s(plain_s / turns)), "compute at the best rates")
        self.rough = plain
        if plain.iteration_s >= found_s:
            return
        prices = token_prices(fleet) if crosses else Prices((1.0,), {}, {})
        demand = Demand(
            job=job,
            sites=list(sites_of(fleet, crosses, prices)),
            turns=[turns] if data_parallel else list(range(1, min(together - 1, _TURNS) + 1)),
            ring=ring,
            several=data_parallel != 1,
            prices=prices.parts,
            depths=proof.depths,
            more_turns=data_parallel is None and together - 1 > _TURNS,
        )
        # With several stages, the ceiling also counts GPUs that wait for another stage.
        least_s = plain_s if job.pipeline_parallel == 1 else 0.0
        least_s = demand.least_s(Box((1, len(fleet.units))), least_s, found_s)
        classes = classes_of(demand.sites)
        if least_s < found_s * (1 - _CLOSE) and not demand.more_turns and packable(classes, proof.packed):
            of_interest = least_s, found_s
            self._packing = Packing(job, classes, demand.turns, demand.several, ring, of_interest, proof)
            shapes = replica_shapes(fleet, classes, data_parallel) if demand.several else ()
            if demand.several and len(shapes) <= proof.replicas:
                self._replicas = ReplicaChoices(fleet, classes, shapes, demand, found_s, proof)
                least_s = self._replicas.together(closely=False).least_s(least_s, found_s)
            else:
                least_s = self._packing.least_s()
        counted = Bound(least_s, "compute and communication")
        self.rough = max(plain, counted, key=_seconds)

    def groupings(self) -> tuple[Grouping, ...]:
        """Of all units as one replica, that hold most by fractions of groups, where these are few."""
        # Replicas that are given have groups of their own.
        if self._packing is None or self._data_parallel != 1:
            return ()
        aims = np.linspace(self.rough.iteration_s, self._found_s, self._aims).tolist()
        return tuple(dict.fromkeys(one for aim in aims for one in self._packing.groupings(aim)))

    def closely(self, found_s: float) -> Bound:
        """By whole groups besides."""
        least_s = self.rough.iteration_s
        if self._packing and not self._replicas:
            least_s = max(least_s, self._packing.closely_least_s(found_s))
        if self._replicas and least_s < found_s:
            least_s = self._replicas.together(closely=True).least_s(least_s, found_s)
        return replace(self.rough, iteration_s=least_s)


def _together(job: Job) -> int:
    """Micro-batches of an iteration, of all replicas."""
    return job.global_batch_size // job.micro_batch_size
