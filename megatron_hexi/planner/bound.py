"""A time that no plan can beat: a bound over all groupings, shards, heads and replicas, with communication.

Take any plan, and let all passes of a layer take tau seconds. A *piece* is what one group has on one site: n
units that hold n t of the group's tokens and h of its H heads. Whatever else the plan does, a piece needs

    token work of t tokens a unit
  + all-to-alls: a unit's tokens times the heads that it does not have itself, over its links
  + for each pass the longer of
      attention: ceil(h / n) heads of the group's tokens: own block, rectangles, merging
      exchange: at least half the keys of tokens that are not its group's, over the links that they cross

and that is at most tau. So a unit in such a piece holds `Pieces.most` at most. The pieces of a group have all
of its heads: h / H adds up to 1 over them, and to the number of groups N over all. So a plan with N
groups needs units that each pick a piece (n, h), with h / (H n) adding up to N, and hold the whole sequence.
Everything else is relaxed; the sum is bounded by Lagrangian duality with one multiplier for N, and tau
found by branch and bound over N (demand.py).

Gradients and weights go round in rings that hide behind the last backward and the first forward pass, in the
time that these leave the wire free. All units wait for the busiest wire, so plans are told apart by what uses
it most: no unit's all-to-alls and keys take more than that, and every unit waits for a ring that hides in the
rest only.

Shards are laid out as the nested zigzag, so a group's attention area is its tokens x S / 2. A piece holds the
same part of its group's tokens as of its heads: one that does not must send the difference over its
site's links, which does not pay at the prices of holding a token and of its attention that prices.py finds.
Where memory is full, it may: then it holds as many as there is room for beside those that it attends to
(room.py), and the price of holding goes up to what a token takes of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hexi.cost import Job
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.memory import GIB
from megatron_hexi.planner.choose import single_sites
from megatron_hexi.planner.demand import Box, Demand, Site
from megatron_hexi.planner.gradients import Ring, least_ring
from megatron_hexi.planner.links import Links, best_links
from megatron_hexi.planner.piece import Pieces
from megatron_hexi.planner.prices import Prices, token_prices
from megatron_hexi.planner.units import Fleet

_ALL = "compute and communication"
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


def lower_bound(fleet: Fleet, data_parallel: int | None, found_s: float) -> Bound:
    """The bound over all plans on all or some of the units.

    Plans on one site need no network; all others wait for gradients that cross it.

    Args:
        fleet: the units.
        data_parallel: replicas, equal; ``None``: as many as a plan likes.
        found_s: an iteration that is known to be possible; the bound need not be higher.
    """
    several = len(fleet.sites) > 1
    cases = [_case(fleet, data_parallel, found_s, crosses=several)]
    if several:
        cases += [_case(site, data_parallel, found_s, crosses=False) for site in single_sites(fleet)]
    return min(cases, key=lambda bound: bound.iteration_s)


def _case(fleet: Fleet, data_parallel: int | None, found_s: float, crosses: bool) -> Bound:
    """The bound over plans that keep to the fleet, and cross its sites or do not."""
    job = fleet.job
    together = job.global_batch_size // job.micro_batch_size
    turns = together // data_parallel if data_parallel else 1
    ring = least_ring(fleet, found_s, crosses)

    def whole(layers_s: float) -> float:
        return min(found_s, layers_s + ring.wait_s(layers_s / turns))

    plain_s = job.global_batch_size * job.seq_length / fleet.ceiling_tokens_per_s
    plain = Bound(whole(plain_s), "compute at the best rates")
    if plain.iteration_s >= found_s:
        return plain
    prices = token_prices(fleet) if crosses else Prices((1.0,), {}, {})
    # With several stages, the ceiling also counts GPUs that wait for another stage.
    least_s = plain_s if job.pipeline_parallel == 1 else 0.0
    stages = [
        _stage_s(fleet, stage, data_parallel, (least_s, found_s), crosses, ring, prices)
        for stage in range(job.pipeline_parallel)
    ]
    if _counts_ring(job, data_parallel):
        return max(plain, Bound(min(found_s, max(stages)), _ALL), key=lambda bound: bound.iteration_s)
    # 1F1B: all micro-batches pass the slowest stage, one of them the others besides.
    longest = max(stages)
    layers_s = longest + (sum(stages) - longest) / turns
    return max(plain, Bound(whole(layers_s), _ALL), key=lambda bound: bound.iteration_s)


def _counts_ring(job: Job, data_parallel: int | None) -> bool:
    """Whether the ring of gradients is counted in each replica's micro-batches; if not, after all stages."""
    return data_parallel is None or job.pipeline_parallel == 1


def _stage_s(
    fleet: Fleet,
    stage: int,
    data_parallel: int | None,
    between: tuple[float, float],
    crosses: bool,
    ring: Ring,
    prices: Prices,
) -> float:
    """Seconds, between two, that all micro-batches of an iteration need at least on one pipeline stage."""
    job = fleet.job
    together = job.global_batch_size // job.micro_batch_size
    demand = Demand(
        job=job,
        sites=list(_sites(fleet, stage, crosses, prices)),
        turns=[together // data_parallel] if data_parallel else list(range(1, min(together, _TURNS) + 1)),
        ring=ring if _counts_ring(job, data_parallel) else Ring(),
        several=data_parallel != 1,
        prices=prices.parts,
        more_turns=data_parallel is None and together > _TURNS,
    )
    least_s, found_s = between
    return demand.least_s(Box((1, len(fleet.units))), least_s, found_s)


def _sites(fleet: Fleet, stage: int, crosses: bool, prices: Prices) -> Iterator[Site]:
    classes: dict[tuple[int, Links, int], list[int]] = {}
    for site in fleet.sites:
        for unit in site:
            name = fleet.units[unit].kind, best_links(fleet, unit, crosses, stage), len(site)
            classes.setdefault(name, []).append(unit)
    for (kind, links, size), units in classes.items():
        device = fleet.kinds[kind].devices[stage]
        speeds = device_speeds(device, fleet.job)
        usable = device.usable_gib * GIB
        pieces = Pieces(fleet.job, speeds, links, size, stage, usable, len(fleet.units))
        yield Site(
            len(units),
            pieces,
            fleet.kinds[kind].tokens_per_s,
            prices.extra.get(kind, 0.0),
            prices.most.get(kind, 1.0),
        )
